"""`adafuse generate`: continue a prompt, or answer it as a chat message."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

from adafuse_llm import InvalidInputError, InvalidOptionError, StreamEvent
from adafuse_llm.cli.common import INTERRUPTED, ONE_RESPONSE, STOPPED, Command, Parser, Setup
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    last,
    print_json,
    show_stream,
    tell,
)


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    parser.add_argument("prompt", metavar="PROMPT", help="Text to continue. - reads stdin.")
    parser.flag("--chat", "Send the prompt as a chat message.")
    parser.flag("--system TEXT", "System message before the prompt. Needs --chat.")
    parser.flag("--prefill TEXT", "Beginning of the reply to complete. Needs --chat.")
    parser.flag("--json", "Print one JSON object.")


def generate(setup: Setup, flags: Namespace) -> int:
    """Continue a prompt, or answer it as a chat message, and show the text as it grows.

    Output to a file or pipe is only the text, exactly as decoded, and a final newline. With --json,
    it is only JSON.
    """
    request = _request(flags)
    with setup.load() as engine, cancel_on_interrupt() as cancel:
        started = time.perf_counter()
        display = setup.display(engine)
        events = engine.stream(**request, cancel=cancel)
        if flags.json:
            generation = last(events)
            apart = {"answer": generation.answer, "reasoning": generation.reasoning}
            print_json({"generation": generation.model_dump(mode="json"), **apart})
        elif display.console.is_terminal:
            display.console.print(display.legend(), "", sep="\n")
            generation = show_stream(display, events)
            seconds = time.perf_counter() - started
            display.console.print("", display.summary(generation, seconds), sep="\n")
        else:
            generation = last(events, _print_plain)
            sys.stdout.write("\n")
    if setup.has_grammar and generation.cut_by:
        tell(f"the response is not whole: {generation.cut_by} cut it off")
    if generation.finish_reason == "cancelled":
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


def _print_plain(event: StreamEvent) -> None:
    sys.stdout.write(event.text)
    sys.stdout.flush()


COMMAND = Command(
    generate,
    add_flags,
    "PROMPT",
    refused={
        **ONE_RESPONSE,
        "continue_final_message": "adafuse generate writes the messages itself; pass the beginning "
        "of the reply with --prefill TEXT",
    },
)
