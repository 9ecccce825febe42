"""`adafuse generate`: continue a prompt, or answer it as a chat message."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from adafuse_llm import Generation, InvalidInputError, InvalidOptionError, StreamEvent
from adafuse_llm.cli.common import INTERRUPTED, STOPPED, Setup
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    check_page,
    last,
    print_json,
    stderr_console,
    write_page,
)
from adafuse_llm.report import styles
from adafuse_llm.report.page import page
from adafuse_llm.report.styles import printable
from adafuse_llm.report.terminal import Display, Growing


def generate(
    setup: Setup,
    *,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="Text to continue. With -, read the text from stdin and remove one final newline.",
        ),
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a chat message.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message before the prompt. Needs --chat.")
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Beginning of the reply. The members write the rest, which is the response. "
            "Needs --chat.",
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Print a table per round: candidates, how unlikely each member finds them, their "
            "score, the winner, proposers.",
        ),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write the text and its rounds to this HTML file.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help='Print JSON lines: {"round": ...} after each round, then {"generation": ..., '
            '"answer": ..., "reasoning": ...}. With --n, only the last line.',
        ),
    ] = False,
) -> int:
    """Continue a prompt, or answer it as a chat message, and show the text as it grows.

    If the output goes to a file or pipe, it is only the text, exactly as decoded, and a final
    newline. With --n, the responses are shown when all are complete, each below a heading with its
    seed.
    """
    check_page(html)
    text = sys.stdin.buffer.read() if prompt == "-" else prompt
    request = _request(text, chat=chat, system=system, prefill=prefill)
    if trace and as_json:
        raise InvalidOptionError(
            "--json includes everything that --trace shows: pass only one of them"
        )
    with setup.engine() as engine, cancel_on_interrupt() as cancel:
        started = time.perf_counter()
        display = setup.display(engine)
        if setup.config.n > 1:
            with stderr_console().status(f"drawing {setup.config.n} responses"):
                generation = engine.generate(**request, cancel=cancel)
            _print_all(display, generation, as_json=as_json, trace=trace)
        else:
            events = engine.stream(**request, cancel=cancel)
            generation = _print_stream(display, events, as_json=as_json, trace=trace)
            if not as_json and display.console.is_terminal:
                seconds = time.perf_counter() - started
                display.console.print("", display.summary(generation, seconds), sep="\n")
    if html is not None:
        write_page(html, page(generation, title=_title(request)))
    reasons = {each.finish_reason for each in styles.responses(generation)}
    if setup.has_grammar and "length" in reasons:
        typer.echo(CLOSED, err=True)
    if "cancelled" in reasons:
        typer.echo(STOPPED, err=True)
        return INTERRUPTED
    return 0


REFUSED = {
    "continue_final_message": "adafuse generate writes the messages itself; pass the beginning of "
    "the reply with --prefill TEXT",
}
"""Options that this command refuses, with the reason."""

CLOSED = (
    "The response reached the length limit, so it was completed with short text. "
    "Allow more with --max-new-tokens, or limit the form."
)
"""What the command prints on stderr if a response of a given form reached the limit."""


def _request(
    prompt: str | bytes, *, chat: bool, system: str | None, prefill: str | None
) -> dict[str, Any]:
    """Return the arguments for `AdaFuseEngine.stream`."""
    if isinstance(prompt, bytes):
        try:
            prompt = prompt.decode("utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"stdin is not UTF-8 text: {error}") from error
    if not chat:
        for flag, value in (("--system", system), ("--prefill", prefill)):
            if value is not None:
                raise InvalidOptionError(
                    f"{flag} needs --chat: without --chat, the prompt is text and not a "
                    "conversation"
                )
        return {"prompt": prompt}
    if not prompt.strip():
        raise InvalidInputError("the prompt is empty: pass text to answer")
    turns = [("system", system), ("user", prompt), ("assistant", prefill)]
    messages = [{"role": role, "content": text} for role, text in turns if text]
    return {"messages": messages, **({"continue_final_message": True} if prefill else {})}


def _title(request: dict[str, Any]) -> str:
    """Return the heading of the page: the beginning of the prompt."""
    turns = request.get("messages", ())
    users = [turn["content"] for turn in turns if turn["role"] == "user"]
    prompt = users[-1] if users else request["prompt"]
    return textwrap.shorten(prompt, 100, placeholder=" …") or "Ensemble response"


def _print_stream(
    display: Display, events: Iterator[StreamEvent], *, as_json: bool, trace: bool
) -> Generation:
    """Print one response as it grows, and return it."""
    if as_json:
        return last(events, _print_json)
    if not trace and not display.console.is_terminal:
        generation = last(events, _print_plain)
        sys.stdout.write("\n")
        return generation
    return (_print_trace if trace else _print_in_color)(display, events)


def _print_all(display: Display, generation: Generation, *, as_json: bool, trace: bool) -> None:
    """Print all responses of a generation, each below a heading."""
    console = display.console
    if as_json:
        _print_generation(generation)
        return
    if trace or console.is_terminal:
        console.print(display.legend(), "", sep="\n")
    for place, each in enumerate(styles.responses(generation)):
        heading = Text(styles.heading(place, generation), "bold")
        console.print(*([""] if place else []), heading, sep="\n")
        for decided in each.rounds if trace else ():
            console.print(display.trace(decided), "", sep="\n")
        if trace:
            console.print(display.terms(each.rounds, by_member=True), "", sep="\n")
        if console.is_terminal:
            console.print(*display.response(each), sep="\n", soft_wrap=True)
            console.print(display.summary(each))
        else:
            _print_plain(each)
            sys.stdout.write("\n")


def _print_json(event: StreamEvent) -> None:
    if event.round is not None:
        print_json({"round": event.round.model_dump(mode="json")})
    if event.generation is not None:
        _print_generation(event.generation)


def _print_generation(generation: Generation) -> None:
    print_json(
        {
            "generation": generation.model_dump(mode="json"),
            "answer": generation.answer,
            "reasoning": generation.reasoning,
        }
    )


def _print_plain(part: StreamEvent | Generation) -> None:
    sys.stdout.write(part.text)
    sys.stdout.flush()


def _print_trace(display: Display, events: Iterator[StreamEvent]) -> Generation:
    """Print a table per round, then the text."""

    def show(event: StreamEvent) -> None:
        if event.round is not None:
            display.console.print(display.trace(event.round), "", sep="\n")

    display.console.print(display.legend(), "", sep="\n")
    generation = last(events, show)
    display.console.print(display.terms(generation.rounds, by_member=True), "", sep="\n")
    display.console.print(Text(printable(generation.text)), soft_wrap=True)
    return generation


def _print_in_color(display: Display, events: Iterator[StreamEvent]) -> Generation:
    """Print the text as it grows, in the colors of the members."""
    growing = Growing(display)

    def show(event: StreamEvent) -> None:
        display.console.print(growing.add(event), end="", soft_wrap=True)

    display.console.print(display.legend(), "", sep="\n")
    try:
        return last(events, show)
    finally:
        display.console.print()
