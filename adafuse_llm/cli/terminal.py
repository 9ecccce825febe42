"""Consoles, answers that grow, progress bars, Ctrl-C and JSON in a terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text

from adafuse_llm import Generation, StreamEvent
from adafuse_llm.report.styles import printable, reasoning_length
from adafuse_llm.report.terminal import Display


def stdout_console() -> Console:
    """Return a console for results. Without a terminal, its width is $COLUMNS or 120."""
    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(
        file=sys.stdout, width=None if wide else 120, markup=False, emoji=False, highlight=False
    )


def stderr_console() -> Console:
    """Return a console for progress and messages."""
    return Console(file=sys.stderr, markup=False, emoji=False, highlight=False)


def tell(message: str) -> None:
    """Print a line on stderr."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def one_line(text: str) -> str:
    """Return a text as one line, with U+FFFD instead of control characters."""
    return printable(" ".join(text.split()))


def show_stream(display: Display, events: Iterator[StreamEvent]) -> Generation:
    """Print a response as it grows, in the colors of the members, and return the generation."""
    text = ""

    def show(event: StreamEvent) -> None:
        nonlocal text
        start, text = len(text), text + event.text
        shown = Text(printable(event.text))
        if event.round is not None:
            reasoning = reasoning_length(text, event.reply_prefix)
            shown = display.span(event.text, event.round, max(0, reasoning - start))
        display.console.print(shown, end="", soft_wrap=True)

    try:
        return last(events, show)
    finally:
        display.console.print()


def last(
    events: Iterator[StreamEvent], show: Callable[[StreamEvent], object] = lambda _event: None
) -> Generation:
    """Show a spinner, then call `show` for every event of a stream. Return the generation."""
    generation = None
    with stderr_console().status("reading the prompt") as status:
        for event in events:
            status.stop()
            show(event)
            generation = event.generation
    assert generation is not None
    return generation


@contextmanager
def cancel_on_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets. A second Ctrl-C raises `KeyboardInterrupt`."""
    cancel = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:  # background jobs ignore Ctrl-C
        signal.signal(signal.SIGINT, on_signal)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, previous)


def print_json(value: object) -> None:
    """Print a value as one line of JSON in ASCII, so that no character can control a terminal."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def progress_bar() -> Progress:
    """Return a progress bar on stderr, which is hidden unless stderr is a terminal."""
    console = stderr_console()
    return Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        speed_estimate_period=3600,  # seconds; long, because one answer may take minutes
        disable=not console.is_terminal,
    )


def discard_stdout() -> None:
    """Redirect stdout to the null device, so that Python's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
