"""`adafuse chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from rich.text import Text

from adafuse_llm import AdaFuseEngine, AdaFuseError, Generation, InvalidInputError
from adafuse_llm.cli.ask import EMBEDDED, add_documents, show_sources
from adafuse_llm.cli.common import ONE_RESPONSE, Command, Parser, Setup
from adafuse_llm.cli.terminal import cancel_on_interrupt, one_line, show_stream, tell
from adafuse_llm.documents import Passage, Retriever, question_messages, read_documents
from adafuse_llm.report.terminal import Display

COMMANDS: Final = {
    "/alone": "show what each member answers alone to the last question",
    "/why": "show the rounds of the last answer",
    "/new": "begin a new conversation",
    "/help": "show this list",
    "/quit": "end (or Ctrl-D)",
}
"""Commands that users can type instead of a message, with what they do."""


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    parser.flag("--system TEXT", "System message of the conversation.")
    add_documents(parser)


def chat(setup: Setup, flags: Namespace) -> int:
    """Talk with the ensemble, and see which member wrote what.

    Answers appear as they are written, in the colors of the members. In a pipe, each line is a
    question, and the output is only the answers. With --docs, the members read every question with
    the passages that best fit it and the previous question.
    """
    retriever = None
    if flags.docs:
        retriever = Retriever(read_documents(flags.docs))
    if setup.is_embedded:
        tell(EMBEDDED)
    with setup.load() as engine:
        display = setup.display(engine)
        talk = _Conversation(engine, display, flags.system, retriever, flags.passages)
        if sys.stdin.isatty():
            hint = Text("Ctrl-C stops an answer. /help", "dim")
            display.console.print(display.legend(), hint, "", sep="\n")
        for line in _lines():
            if not talk.take(line):
                break
    return 0


def _lines() -> Iterator[str]:
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with suppress(ImportError):
            import readline  # so that `input` can edit lines and recall earlier ones

            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one input
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            sys.stdout.write("\n")  # Ctrl-C drops the line
            continue
        if line.strip():
            yield line


class _Conversation:
    """A conversation with an ensemble. With a retriever, every question comes with passages."""

    def __init__(
        self,
        engine: AdaFuseEngine,
        display: Display,
        system: str | None,
        retriever: Retriever | None,
        passages: int,
    ) -> None:
        self._engine = engine
        self._display = display
        self._console = display.console
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*self._start]
        self._retriever, self._passages = retriever, passages
        self._answer: Generation | None = None
        self._sent: list[dict[str, str]] = []

    def take(self, line: str) -> bool:
        """Obey a command or answer a message. Return False if the conversation ends.

        After an error, which is printed, the conversation goes on without the message.
        """
        name = line.split(maxsplit=1)[0]
        if name == "/quit":
            return False
        before = len(self._messages)
        try:
            if name in COMMANDS:
                self._obey(name)
            elif name.startswith("/") and "/" not in name[1:]:  # not a path
                raise InvalidInputError(f"there is no {name}. Commands: {', '.join(COMMANDS)}.")
            else:
                self._messages.append({"role": "user", "content": line})
                self._reply()
        except AdaFuseError as error:
            del self._messages[before:]
            tell(f"error: {one_line(str(error))}")
        return True

    def _obey(self, name: str) -> None:
        show, display = self._console.print, self._display
        if name == "/help":
            for command, does in COMMANDS.items():
                show(Text(f"{command:8}").append(does, "dim"))
        elif name == "/new":
            self._messages, self._answer = [*self._start], None
        elif self._answer is None:
            raise InvalidInputError(f"{name} needs an answer. Ask something first.")
        elif name == "/alone":
            one = self._engine.with_strategy("single")
            names = self._engine.config.use or self._engine.members
            with cancel_on_interrupt() as cancel:
                alone = {
                    name: one.generate(messages=self._sent, use=(name,), cancel=cancel)
                    for name in names
                }
            show(display.alone({name: each.answer.strip() for name, each in alone.items()}))
        else:
            show(display.rounds(self._answer.rounds))
            show(display.summary(self._answer))

    def _reply(self) -> None:
        """Answer the last message. After Ctrl-C, the text so far becomes the answer.

        If the answer is empty, the conversation goes on without the message.
        """
        self._sent = [*self._messages]
        asked = [message["content"] for message in self._messages if message["role"] == "user"][-2:]
        passages: list[Passage] = []
        if self._retriever is not None:
            passages = self._retriever.search(" ".join(asked), k=self._passages)
            self._sent[-1:] = question_messages(asked[-1], passages)
        with cancel_on_interrupt() as cancel:
            events = self._engine.stream(messages=self._sent, cancel=cancel)
            self._answer = show_stream(self._display, events)
        if content := self._answer.answer.strip():
            self._messages.append({"role": "assistant", "content": content})
        else:
            del self._messages[-1]
        if self._console.is_terminal:
            if cancel.is_set():
                self._console.print(Text("stopped", "dim"))
            if self._retriever is not None:
                show_sources(self._console, passages)


COMMAND = Command(chat, add_flags, refused=ONE_RESPONSE)
