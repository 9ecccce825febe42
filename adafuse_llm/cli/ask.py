"""`adafuse ask`: answer a question from documents."""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.text import Text

from adafuse_llm import AdaFuseEngine, ContextWindowError, Generation, StreamEvent
from adafuse_llm.cli.common import INTERRUPTED, STOPPED, Command, Parser, Setup
from adafuse_llm.cli.passages import EMBEDDED, add_documents, search_in, show_sources
from adafuse_llm.cli.terminal import cancel_on_interrupt, last, print_json, show_stream, tell
from adafuse_llm.documents import question_messages
from adafuse_llm.embedded import handbook_path
from adafuse_llm.report.styles import printable
from adafuse_llm.report.terminal import Display


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    parser.add_argument("question", metavar="QUESTION", help="Question to answer.")
    add_documents(parser, " Default: the handbook of a fictional town.")
    parser.flag("--compare", "Also show what each member answers alone.")
    parser.flag("--json", "Print one JSON object.")


def ask(setup: Setup, flags: Namespace) -> int:
    """Answer a question from documents and show how the ensemble decides.

    An offline search (BM25) finds the best passages, and the members answer from them together.
    """
    question: str = flags.question
    retriever = search_in(flags.docs or [handbook_path()])
    sources = retriever.search(question, k=flags.passages)
    if setup.is_embedded:
        tell(EMBEDDED)
    messages = question_messages(question, sources)
    started = time.perf_counter()
    with setup.load() as engine, cancel_on_interrupt() as cancel:
        loaded = time.perf_counter()
        try:
            events = engine.stream(messages=messages, cancel=cancel)
        except ContextWindowError as error:
            raise ContextWindowError(f"{error} Lower --passages to shorten the prompt.") from error
        display = setup.display(engine)
        console = display.console
        generation = last(events) if flags.json else _show_answer(question, display, events)
        seconds = time.perf_counter() - loaded
        alone: dict[str, str] = {}
        if flags.compare and generation.finish_reason != "cancelled":
            alone = answers_alone(engine, messages, cancel)
        if not flags.json:
            _show_rounds(generation, alone, display)
            show_sources(console, sources)
            console.print()
    if flags.json:
        answer = {
            "question": question,
            "answer": generation.answer,
            "reasoning": generation.reasoning,
            **({"alone": alone} if flags.compare else {}),
            "sources": [asdict(each) for each in sources],
            "members": list(display.members),
            **generation.model_dump(mode="json", exclude={"text"}),
            "seconds": round(seconds, 3),
            "loading_seconds": round(loaded - started, 3),
        }
        print_json(answer)
    else:
        console.print(display.summary(generation, seconds))
    if cancel.is_set():
        tell(STOPPED)
        return INTERRUPTED
    return 0


def answers_alone(
    engine: AdaFuseEngine, messages: Sequence[Mapping[str, str]], cancel: threading.Event
) -> dict[str, str]:
    """Return the answer that each member gives alone, by member."""
    one = engine.with_strategy("single")
    return {
        name: one.generate(messages=messages, use=(name,), cancel=cancel).answer.strip()
        for name in engine.config.use or engine.members
    }


def _show_answer(question: str, display: Display, events: Iterator[StreamEvent]) -> Generation:
    console = display.console
    if console.is_terminal:
        console.print(Text(printable(question), "bold"))
        console.print(display.legend(), "", sep="\n")
    generation = show_stream(display, events)
    console.print()
    return generation


def _show_rounds(generation: Generation, alone: Mapping[str, str], display: Display) -> None:
    console = display.console
    if alone:
        console.print(Text("Each member alone", "bold"))
        console.print(display.alone(alone), "")
    columns = ": winning member, its text, score, and the runner-up or who was not asked"
    console.print(Text("Rounds", "bold").append(columns, "not bold dim"))
    console.print(display.rounds(generation.rounds), "", sep="\n")


COMMAND = Command(
    ask,
    add_flags,
    "QUESTION",
    refused={
        "n": "adafuse ask gives one answer; adafuse generate --n draws several",
        "continue_final_message": "adafuse ask writes the messages itself",
    },
)
