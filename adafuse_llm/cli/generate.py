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
from adafuse_llm.cli.common import (
    INTERRUPTED,
    STOPPED,
    Setup,
    cancel_on_interrupt,
    check_page,
    last,
    print_json,
    stdout_console,
    write_page,
)
from adafuse_llm.report.page import page
from adafuse_llm.report.styles import printable
from adafuse_llm.report.terminal import Display


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
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Print a table per round: candidates, each member's NLL (nats per token), fused "
            "score F, winner, proposers.",
        ),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write the text and its rounds to this HTML file.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help='Print JSON lines: {"round": ...} after each round, then {"generation": ...}.',
        ),
    ] = False,
) -> int:
    """Continue a prompt, or answer it as a chat message, and show the text as it grows.

    If the output goes to a file or pipe, it is only the text, exactly as decoded, and a final
    newline.
    """
    check_page(html)
    request = _request(sys.stdin.buffer.read() if prompt == "-" else prompt, chat, system)
    if trace and as_json:
        raise InvalidOptionError(
            "--json includes everything that --trace shows: pass only one of them"
        )
    with setup.engine() as engine, cancel_on_interrupt() as cancel:
        started = time.perf_counter()
        events = engine.stream(**request, cancel=cancel)
        display = Display(engine.members, stdout_console(), forced=setup.has_grammar)
        if as_json:
            generation = last(events, _print_json)
        elif trace:
            generation = _print_trace(display, events)
        elif display.console.is_terminal:
            generation = _print_in_color(display, events)
        else:
            generation = last(events, _print_plain)
            sys.stdout.write("\n")
        if not as_json and display.console.is_terminal:
            seconds = time.perf_counter() - started
            display.console.print("", display.summary(generation, seconds), sep="\n")
    if html is not None:
        write_page(html, page(generation, title=_title(request)))
    if setup.has_grammar and generation.finish_reason == "length":
        typer.echo(CLOSED, err=True)
    if generation.finish_reason == "cancelled":
        typer.echo(STOPPED, err=True)
        return INTERRUPTED
    return 0


CLOSED = (
    "The response reached the length limit, so it was completed with short text. "
    "Allow more with --max-new-tokens, or limit the form."
)
"""What the command prints on stderr if a response of a given form reached the limit."""


def _request(prompt: str | bytes, chat: bool, system: str | None) -> dict[str, Any]:
    """Return the arguments for `AdaFuseEngine.stream`."""
    if isinstance(prompt, bytes):
        try:
            prompt = prompt.decode("utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"stdin is not UTF-8 text: {error}") from error
    if not chat:
        if system is not None:
            raise InvalidOptionError(
                "--system needs --chat: without --chat, the prompt is text and not a conversation"
            )
        return {"prompt": prompt}
    if not prompt.strip():
        raise InvalidInputError("the prompt is empty: pass text to answer")
    turns = [("system", system), ("user", prompt)]
    return {"messages": [{"role": role, "content": text} for role, text in turns if text]}


def _title(request: dict[str, Any]) -> str:
    """Return the heading of the page: the beginning of the prompt."""
    prompt = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
    return textwrap.shorten(prompt, 100, placeholder=" …") or "Ensemble response"


def _print_json(event: StreamEvent) -> None:
    if event.round is not None:
        print_json({"round": event.round.model_dump(mode="json")})
    if event.generation is not None:
        print_json({"generation": event.generation.model_dump(mode="json")})


def _print_plain(event: StreamEvent) -> None:
    sys.stdout.write(event.text)
    sys.stdout.flush()


def _print_trace(display: Display, events: Iterator[StreamEvent]) -> Generation:
    """Print a table per round, then the text."""

    def show(event: StreamEvent) -> None:
        if event.round is not None:
            display.console.print(display.trace(event.round), "", sep="\n")

    display.console.print(display.legend(), "", sep="\n")
    generation = last(events, show)
    display.console.print(Text(printable(generation.text)), soft_wrap=True)
    return generation


def _print_in_color(display: Display, events: Iterator[StreamEvent]) -> Generation:
    """Print the text as it grows, in the colors of the members."""

    def show(event: StreamEvent) -> None:
        shown = (
            Text(printable(event.text))
            if event.round is None
            else display.span(event.text, event.round)
        )
        display.console.print(shown, end="", soft_wrap=True)

    display.console.print(display.legend(), "", sep="\n")
    try:
        return last(events, show)
    finally:
        display.console.print()
