"""`adafuse generate`: continue a prompt, or answer it as a chat message."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

from rich.text import Text

from adafuse_llm import Generation, InvalidInputError, InvalidOptionError, StreamEvent
from adafuse_llm.cli.common import INTERRUPTED, STOPPED, Command, Parser, Setup
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    last,
    print_json,
    show_stream,
    stderr_console,
    tell,
)
from adafuse_llm.report import styles
from adafuse_llm.report.terminal import Display


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    parser.add_argument("prompt", metavar="PROMPT", help="Text to continue. - reads stdin.")
    parser.flag("--chat", "Send the prompt as a chat message.")
    parser.flag("--system TEXT", "System message before the prompt. Needs --chat.")
    parser.flag("--prefill TEXT", "Beginning of the reply to complete. Needs --chat.")
    parser.flag("--n NUMBER", "Number of responses to draw.")
    parser.flag("--json", "Print a JSON line per round, and one with the whole response.")


def generate(setup: Setup, flags: Namespace) -> int:
    """Continue a prompt, or answer it as a chat message, and show the text as it grows.

    Output to a file or pipe is only the text, exactly as decoded, and a final newline. With --json,
    it is only JSON. With --n, all responses are shown when they are complete, each below its seed.
    """
    request = _request(flags)
    with setup.load() as engine, cancel_on_interrupt() as cancel:
        started = time.perf_counter()
        display = setup.display(engine)
        if setup.file.n > 1:
            with stderr_console().status(f"drawing {setup.file.n} responses"):
                generation = engine.generate(**request, cancel=cancel)
            if not flags.json:
                _print_all(display, generation)
        elif flags.json:
            generation = last(engine.stream(**request, cancel=cancel), _print_round)
        else:
            events = engine.stream(**request, cancel=cancel)
            if display.console.is_terminal:
                display.console.print(display.legend(), "", sep="\n")
                generation = show_stream(display, events)
                seconds = time.perf_counter() - started
                display.console.print("", display.summary(generation, seconds), sep="\n")
            else:
                generation = last(events, _print_plain)
                sys.stdout.write("\n")
        if flags.json:
            whole = generation.model_dump(mode="json")
            apart = {"answer": generation.answer, "reasoning": generation.reasoning}
            print_json({"generation": whole, **apart})
    responses = (generation, *generation.alternatives)
    limits = [each.cut_by for each in responses if each.cut_by]
    if setup.has_grammar and limits:
        tell(f"the response is not whole: {limits[0]} cut it off")
    if any(each.finish_reason == "cancelled" for each in responses):
        tell(STOPPED)
        return INTERRUPTED
    return 0


def _request(flags: Namespace) -> dict[str, Any]:
    """Return arguments for `AdaFuseEngine.stream`. For the prompt ``-``, read stdin."""
    if flags.prompt == "-":
        try:
            flags.prompt = sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"stdin is not UTF-8 text: {error}") from error
    if not flags.chat:
        for flag in ("system", "prefill"):
            if getattr(flags, flag) is not None:
                raise InvalidOptionError(f"--{flag} needs --chat: without it, the prompt is text")
        return {"prompt": flags.prompt}
    if not flags.prompt.strip():
        raise InvalidInputError("the prompt is empty: pass text to answer")
    turns = [("system", flags.system), ("user", flags.prompt), ("assistant", flags.prefill)]
    messages = [{"role": role, "content": text} for role, text in turns if text]
    return {"messages": messages, **({"continue_final_message": True} if flags.prefill else {})}


def _print_all(display: Display, generation: Generation) -> None:
    console = display.console
    if console.is_terminal:
        console.print(display.legend(), "", sep="\n")
    for place, each in enumerate((generation, *generation.alternatives)):
        if place:
            console.print()
        console.print(Text(styles.heading(place, generation), "bold"))
        if console.is_terminal:
            console.print(*display.response(each), sep="\n", soft_wrap=True)
            console.print(display.summary(each))
        else:
            _print_plain(each)
            sys.stdout.write("\n")


def _print_round(event: StreamEvent) -> None:
    if event.round is not None:
        print_json({"round": event.round.model_dump(mode="json")})


def _print_plain(part: StreamEvent | Generation) -> None:
    sys.stdout.write(part.text)
    sys.stdout.flush()


COMMAND = Command(
    generate,
    add_flags,
    "PROMPT",
    refused={
        "continue_final_message": "adafuse generate writes the messages itself; pass the beginning "
        "of the reply with --prefill TEXT"
    },
)
