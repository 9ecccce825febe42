"""`adafuse ask`: answer a question from documents."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from adafuse_llm import AdaFuseEngine, ContextWindowError, Generation, Round, StreamEvent
from adafuse_llm.cli.common import INTERRUPTED, STOPPED, Setup
from adafuse_llm.cli.passages import FollowLinks, HandbookDocs, Passages, show_sources
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    check_page,
    last,
    print_json,
    write_page,
)
from adafuse_llm.documents import Passage, Retriever, question_messages, read_documents
from adafuse_llm.embedded import handbook_path
from adafuse_llm.report.page import page
from adafuse_llm.report.styles import printable
from adafuse_llm.report.terminal import Display, Growing

REFUSED = {
    "n": "adafuse ask gives one answer; adafuse generate --n draws several",
    "continue_final_message": "adafuse ask writes the messages itself, and none is an assistant's",
}
"""Options that this command refuses, with the reason."""

UNFAMILIAR = (
    "warning: the embedded members know only the fictional town of the handbook. About other "
    "documents they often answer wrongly, or 'not stated' although the answer is there. Use your "
    "own models: --model PATH_OR_ID"
)
"""What `ask` prints if the embedded members read other documents than the handbook."""

FAMILIAR = (
    "These models know only the fictional town of this handbook. For your own documents, use your "
    "own models: --docs PATH --model PATH_OR_ID --model PATH_OR_ID"
)
"""What `ask` prints below an answer of the embedded members about the handbook."""


def ask(
    setup: Setup,
    *,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="Question to answer.")],
    docs: HandbookDocs = None,
    follow_links: FollowLinks = False,
    passages: Passages = 3,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write the answer, its rounds and its sources to this HTML file."),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also show what each member answers alone."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Answer a question from documents and show how the ensemble decides.

    An offline search (BM25) finds the best passages, and the members answer from them together.
    """
    check_page(html)
    documents = read_documents(
        docs or [handbook_path()], follow_links=follow_links, on_skip=partial(typer.echo, err=True)
    )
    retriever = Retriever(documents)
    sources = retriever.search(question, k=passages)
    handbook = handbook_path().resolve()
    familiar = all(path.resolve().is_relative_to(handbook) for path in docs or ())
    if setup.is_embedded and not familiar:
        typer.echo(UNFAMILIAR, err=True)
    messages = question_messages(question, sources)
    started = time.perf_counter()
    with setup.engine() as engine, cancel_on_interrupt() as cancel:
        loaded = time.perf_counter()
        try:
            events = engine.stream(messages=messages, cancel=cancel)
        except ContextWindowError as error:
            raise ContextWindowError(f"{error} Lower --passages to shorten the prompt.") from error
        display = setup.display(engine)
        generation = last(events) if as_json else _show_answer(question, sources, display, events)
        seconds = time.perf_counter() - loaded
        alone: dict[str, str] = {}
        if compare and generation.finish_reason != "cancelled":
            alone = answers_alone(engine, messages, cancel)
        if not as_json:
            _show_rounds(generation, alone, display)
            show_sources(display.console, retriever, question, sources)
            display.console.print()
    if html is not None:
        named = [(passage.source, passage.text) for passage in sources]
        write_page(html, page(generation, title=question, alone=alone, sources=named))
    if as_json:
        answer = {
            "question": question,
            "answer": generation.answer,
            "reasoning": generation.reasoning,
            **({"alone": alone} if compare else {}),
            "sources": [asdict(each) for each in sources],
            "members": list(display.members),
            **generation.model_dump(mode="json", exclude={"text"}),
            "seconds": round(seconds, 3),
            "loading_seconds": round(loaded - started, 3),
        }
        print_json(answer)
    else:
        display.console.print(display.summary(generation, seconds))
        if setup.is_embedded and familiar:
            display.console.print(Text(FAMILIAR, "dim"))
    if generation.finish_reason == "cancelled" or (compare and cancel.is_set()):
        typer.echo(STOPPED, err=True)
        return INTERRUPTED
    return 0


class _Progress:
    """A display of the growing answer, with only the last lines and rounds that fit the screen."""

    def __init__(self, display: Display, waiting: str) -> None:
        self.display = display
        self.answer = Text()
        self.rounds: list[Round] = []
        self._growing = Growing(display)
        self._spinner = Spinner("dots", Text(waiting, "dim"))

    def add(self, event: StreamEvent) -> None:
        if event.round is not None:
            self.rounds.append(event.round)
        span = self._growing.add(event)
        if not self.answer.plain:
            span = span[len(span.plain) - len(span.plain.lstrip()) :]
        self.answer.append_text(span)

    def __rich_console__(self, console: Console, _: ConsoleOptions) -> Iterator[RenderableType]:
        if not self.rounds:
            yield self._spinner
            return
        room = max(2, console.height - 4)
        lines = self.answer.wrap(console, console.width)[-max(1, room // 2) :]
        yield Group(*lines)
        yield Text()
        yield self.display.rounds(self.rounds[-max(1, room - len(lines)) :])


def answers_alone(
    engine: AdaFuseEngine, messages: Sequence[Mapping[str, str]], cancel: threading.Event
) -> dict[str, str]:
    """Return the answer that each member gives alone, by member."""
    one = engine.with_strategy("single")
    return {
        name: one.generate(messages=messages, use=(name,), cancel=cancel).answer.strip()
        for name in engine.config.use or engine.members
    }


def _show_answer(
    question: str, sources: Sequence[Passage], display: Display, events: Iterator[StreamEvent]
) -> Generation:
    """Print the answer as it grows."""
    console = display.console
    reading = f"reading {len(sources)} passage{'s' * (len(sources) != 1)}"
    progress = _Progress(display, f"{', '.join(display.members)}: {reading}")
    if console.is_terminal:
        console.print(Text(printable(question), "bold"))
        console.print(display.legend(), "", sep="\n")
    # the display is redrawn while the answer grows; at the end, the whole answer is printed
    live = Live(progress, console=console, transient=True, refresh_per_second=12)
    with live if console.file.isatty() else nullcontext():
        generation = last(events, progress.add, spinner="")
    answer = display.response(generation) if generation.reasoning else [progress.answer]
    console.print(*answer, "", sep="\n", soft_wrap=True)
    return generation


def _show_rounds(generation: Generation, alone: Mapping[str, str], display: Display) -> None:
    """Print the answers of the members alone, and the rounds."""
    console = display.console
    if alone:
        console.print(Text("Each member alone", "bold"))
        console.print(display.alone(alone), "")
    columns = ": winning member, its text, score, and the runner-up or who was not asked"
    console.print(Text("Rounds", "bold").append(columns, "not bold dim"))
    console.print(display.rounds(generation.rounds), display.terms(generation.rounds), sep="\n")
    console.print()
