"""`adafuse chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated, Final

import typer
from rich.text import Text

from adafuse_llm import (
    AdaFuseEngine,
    AdaFuseError,
    Generation,
    InvalidInputError,
    StreamEvent,
)
from adafuse_llm.cli.ask import answers_alone
from adafuse_llm.cli.common import Setup
from adafuse_llm.cli.passages import Docs, FollowLinks, Passages, show_sources
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    interruptible,
    last,
    one_line,
    pasted_more,
)
from adafuse_llm.documents import Passage, Retriever, question_messages, read_documents
from adafuse_llm.report.terminal import Display, Growing

REFUSED = {
    "n": "adafuse chat gives one answer at a time; adafuse generate --n draws several",
    "continue_final_message": "adafuse chat writes the messages itself",
}
"""Options that this command refuses, with the reason."""

COMMANDS: Final = {
    "/alone": "show what each member answers alone to the last question",
    "/why": "show the rounds of the last answer; /why 3 shows the candidates of round 3",
    "/new": "begin a new conversation",
    "/help": "show this list",
    "/quit": "end (or Ctrl-D)",
}
"""Commands of the conversation, with what they do."""

HINT = "A \\ at the end of a line continues it on the next one. Ctrl-C stops an answer. /help"

EMBEDDED = (
    "These models answer from passages about a fictional town, so here they say little. Use your "
    "own models: --model PATH_OR_ID --model PATH_OR_ID"
)
"""What `chat` prints on stderr before a conversation with the embedded members."""


def chat(
    setup: Setup,
    *,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    docs: Docs = None,
    follow_links: FollowLinks = False,
    passages: Passages = 3,
) -> int:
    """Talk with the ensemble, and ask why it said what it said.

    Answers appear as they are written, in the colors of the members. In a pipe, each line is a
    question, and the output is only the answers. With --docs, every question comes with the
    passages that fit it and the question before.
    """
    retriever = None
    if docs:
        skipped = partial(typer.echo, err=True)
        documents = read_documents(docs, follow_links=follow_links, on_skip=skipped)
        retriever = Retriever(documents)
    if setup.is_embedded:
        typer.echo(EMBEDDED, err=True)
    with setup.engine() as engine:
        conversation = _Conversation(engine, system, setup.display(engine))
        conversation.search(retriever, passages)
        for line in _lines(conversation.greet):
            if not conversation.take(line):
                break
    return 0


def _lines(greet: Callable[[], None]) -> Iterator[str]:
    """Yield what the user enters, without the line breaks at the ends."""
    prompts = ("> ", "  ")
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # lets `input` edit lines and recall earlier ones

            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one input
        greet()
    else:
        prompts = ("", "")
    begun: list[str] = []
    while True:
        try:
            with interruptible():
                line = input(prompts[bool(begun)])
        except EOFError:
            if begun:
                yield "\n".join(begun)
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            begun = []  # drops what was entered
            sys.stdout.write("\n")
            continue
        begun.append(line.removesuffix("\\"))
        if line.endswith("\\") or pasted_more():
            continue
        entered = "\n".join(begun)
        begun = []
        if entered.strip():
            yield entered


class _Conversation:
    """A conversation with an ensemble.

    Args:
        engine: the ensemble.
        system: the system message.
        display: the display of its members.
    """

    def __init__(self, engine: AdaFuseEngine, system: str | None, display: Display) -> None:
        self._engine = engine
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*self._start]
        self._display = display
        self._answer: Generation | None = None
        self._sent: list[dict[str, str]] = []
        self._retriever: Retriever | None = None
        self._passages = 0

    def search(self, retriever: Retriever | None, passages: int) -> None:
        """Put passages before every question from now on."""
        self._retriever, self._passages = retriever, passages

    def greet(self) -> None:
        self._display.console.print(self._display.legend(), Text(HINT, "dim"), "", sep="\n")

    def take(self, line: str) -> bool:
        """Obey a command, or answer a message. Return False if the conversation ends.

        An error is printed, and the conversation goes on without the message.
        """
        name, *rest = line.split()
        if name == "/quit":
            return False
        before = len(self._messages)
        try:
            if name in COMMANDS:
                self._obey(name, rest)
            elif name.startswith("/") and not rest:
                raise InvalidInputError(f"there is no {name}. Commands: {', '.join(COMMANDS)}.")
            else:
                self._messages.append({"role": "user", "content": line})
                self._reply()
        except AdaFuseError as error:
            del self._messages[before:]
            typer.echo(f"error: {one_line(str(error))}", err=True)
        return True

    def _obey(self, name: str, rest: list[str]) -> None:
        console = self._display.console
        if name == "/help":
            for each, does in COMMANDS.items():
                console.print(Text(f"{each:8}").append(does, "dim"))
        elif name == "/new":
            self._messages, self._answer = [*self._start], None
        elif self._answer is None:
            raise InvalidInputError(f"{name} needs an answer. Ask something first.")
        elif name == "/alone":
            with cancel_on_interrupt() as cancel:
                alone = answers_alone(self._engine, self._sent, cancel)
            console.print(self._display.alone(alone))
        elif rest:
            rounds = {str(each.index): each for each in self._answer.rounds}
            if rest[0] not in rounds:
                raise InvalidInputError(f"the last answer has rounds 0 to {len(rounds) - 1}")
            found = rounds[rest[0]]
            terms = self._display.terms([found], by_member=True)
            console.print(self._display.legend(), self._display.trace(found), terms, sep="\n")
        else:
            every = self._answer.rounds
            console.print(self._display.rounds(every), self._display.terms(every))
            console.print(self._display.summary(self._answer))

    def _reply(self) -> None:
        """Answer the last message. Ctrl-C ends the answer, which stays in the conversation."""
        console = self._display.console
        growing = Growing(self._display)
        self._sent = [*self._messages]
        asked = [each["content"] for each in self._messages if each["role"] == "user"][-2:]
        found: list[Passage] = []
        if self._retriever is not None:
            found = self._retriever.search(" ".join(asked), k=self._passages)
            self._sent[-1:] = question_messages(asked[-1], found)

        def show(event: StreamEvent) -> None:
            console.print(growing.add(event), end="", soft_wrap=True)

        with cancel_on_interrupt() as cancel:
            try:
                self._answer = last(self._engine.stream(messages=self._sent, cancel=cancel), show)
            finally:
                console.print()
        self._messages.append({"role": "assistant", "content": self._answer.answer.strip()})
        if cancel.is_set() and console.is_terminal:
            console.print(Text("stopped", "dim"))
        if self._retriever is not None and console.is_terminal:
            show_sources(console, self._retriever, " ".join(asked), found)
