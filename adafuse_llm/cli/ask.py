"""`adafuse ask`: answer a question from documents."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from adafuse_llm import ContextWindowError
from adafuse_llm.cli.common import INTERRUPTED, ONE_RESPONSE, STOPPED, Command, Parser, Setup
from adafuse_llm.cli.terminal import cancel_on_interrupt, last, print_json, show_stream, tell
from adafuse_llm.documents import Passage, Retriever, question_messages, read_documents
from adafuse_llm.embedded import handbook_path
from adafuse_llm.report.styles import printable

EMBEDDED = (
    "The embedded members know only the fictional town of the handbook. For anything else, use "
    "your own models: --model PATH_OR_ID --model PATH_OR_ID"
)
"""The hint that commands print on stderr if all members are embedded ones."""


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    parser.add_argument("question", metavar="QUESTION", help="Question to answer.")
    add_documents(parser, " Default: the handbook of a fictional town.")
    parser.flag("--json", "Print one JSON object.")


def ask(setup: Setup, flags: Namespace) -> int:
    """Answer a question from documents and show how the ensemble decides.

    An offline search (BM25) finds the best passages, from which the members answer together.
    """
    question: str = flags.question
    retriever = Retriever(read_documents(flags.docs or [handbook_path()]))
    sources = retriever.search(question, k=flags.passages)
    if setup.is_embedded:
        tell(EMBEDDED)
    messages = question_messages(question, sources)
    with setup.load() as engine, cancel_on_interrupt() as cancel:
        started = time.perf_counter()
        try:
            events = engine.stream(messages=messages, cancel=cancel)
        except ContextWindowError as error:
            raise ContextWindowError(f"{error} Lower --passages to shorten the prompt.") from error
        display = setup.display(engine)
        console = display.console
        if flags.json:
            generation = last(events)
        else:
            if console.is_terminal:
                console.print(Text(printable(question), "bold"))
                console.print(display.legend(), "", sep="\n")
            generation = show_stream(display, events)
            console.print()
        seconds = time.perf_counter() - started
    if flags.json:
        answer = {
            "question": question,
            "answer": generation.answer,
            "reasoning": generation.reasoning,
            "sources": [asdict(each) for each in sources],
            "members": list(display.members),
            **generation.model_dump(mode="json", exclude={"text"}),
            "seconds": round(seconds, 3),
        }
        print_json(answer)
    else:
        columns = ": winning member, its text, score, and the runner-up or who was not asked"
        console.print(Text("Rounds", "bold").append(columns, "not bold dim"))
        console.print(display.rounds(generation.rounds), "", sep="\n")
        show_sources(console, sources)
        console.print("", display.summary(generation, seconds), sep="\n")
    if cancel.is_set():
        tell(STOPPED)
        return INTERRUPTED
    return 0


def add_documents(parser: Parser, default: str = "") -> None:
    """Add the flags --docs and --passages. `default` is appended to the help of --docs."""
    text = "Text or Markdown file, or a folder of such files, from which the members answer."
    parser.flag("--docs PATH", f"{text} Repeatable.{default}")
    parser.flag("--passages N", "Largest number of passages that the members read.", default=3)


def show_sources(console: Console, sources: Sequence[Passage]) -> None:
    """Print one line for each passage, with its BM25 score."""
    console.print(Text("Sources", "bold"))
    if not any(passage.score for passage in sources):
        console.print("No passage has a word of the question, so the members read the first ones.")
    for number, passage in enumerate(sources, start=1):
        excerpt = printable(" ".join(passage.text.replace("#", "").split()))
        line = Text(f"[{number}] {printable(passage.source)} ({passage.score:.1f}): ")
        console.print(line.append(excerpt, "dim"), no_wrap=True, overflow="ellipsis")


COMMAND = Command(ask, add_flags, "QUESTION", refused=ONE_RESPONSE)
