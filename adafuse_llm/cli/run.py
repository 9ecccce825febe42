"""`adafuse run`: answer a test set of questions and write one result per line to a file."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from threading import Event
from typing import Any

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    Generation,
    InvalidInputError,
    InvalidOptionError,
)
from adafuse_llm.cli.common import FAILED, INTERRUPTED, RESUMABLE, Command, Parser, Setup, unescaped
from adafuse_llm.cli.terminal import cancel_on_interrupt, one_line, progress_bar, tell
from adafuse_llm.evaluation.files import Line, Results, is_lost, prompt_form, put, read_lines
from adafuse_llm.evaluation.parallel import in_order
from adafuse_llm.report.styles import count
from adafuse_llm.tree.sampling import derived_seed


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    fields = '"question" and "answer", or with "messages" and "answer"'
    parser.flag("--test-set FILE", f"JSON lines with {fields}.", required=True)
    parser.flag("--output FILE", "File of results to write (JSON lines).", required=True)
    add_prompt(parser)
    parser.flag("--n NUMBER", "Number of responses to draw for each question.")
    parser.flag("--rounds", "Add the rounds and the usage to every result.")


def add_prompt(parser: Parser) -> None:
    """Add the flags for the prompt of a question, and for existing results."""
    parser.flag("--prompts FILE", "Text with instructions and examples before every question.")
    parser.flag(
        "--template TEXT",
        r"Template of a question, with {question}. \n is a line break, \\ a backslash. Default: "
        r"the form of the examples in --prompts, otherwise 'Question: {question}\nAnswer:'.",
        type=unescaped,
    )
    parser.flag("--chat", "Send the prompt as a chat message.")
    parser.flag("--max-requests NUMBER", "Number of questions to answer at the same time.")
    parser.flag("--overwrite", "Start again and discard existing results.")


def run(setup: Setup, flags: Namespace) -> int:
    """Answer a test set and write one result per line. A run can be interrupted and resumed.

    The prompt is the text of --prompts, a blank line, and the question. Several lines are answered
    at the same time (--max-requests). Every result is written at once, so after an interruption the
    same command goes on where it was, and retries lines that failed because of the run.

    Exit codes: 0 all lines answered; 1 some failed; 2 nothing could be run; 130 interrupted.
    """
    test_set, output, chat, rounds = flags.test_set, flags.output, flags.chat, flags.rounds
    form = prompt_form(flags.prompts, flags.template)
    content = test_set.read_bytes()
    lines = read_lines(content, conversations=True)
    config = setup.file.config
    _check(config, lines, flags)
    results = Results(output)
    if output.exists() and any(output.samefile(path) for path in (test_set, flags.prompts) if path):
        raise InvalidInputError(f"--output {output} is also an input file; choose another output")
    identity = {
        "test set": hashlib.sha256(content).hexdigest(),
        "prompts": form,
        "rounds": rounds,
        **({"chat": True} if chat else {}),
        **setup.identity(config),
    }
    with ExitStack() as stack:
        stack.enter_context(results.lock())
        numbers = {line.number for line in lines}
        done = [] if flags.overwrite else results.done(identity, numbers)
        answered, todo = _divide(lines, done)
        failed = sum(error is not None for error in answered.values())
        ran = ""
        if done:
            tell(f"resuming: {len(answered)} of {len(lines)} lines are done")
        if todo:
            engine = stack.enter_context(setup.load(config))
            cancel = stack.enter_context(cancel_on_interrupt())
            progress = stack.enter_context(progress_bar())
            results.begin(identity, afresh=not done)
            task = progress.add_task("answers", total=len(lines), completed=len(answered))
            stack.callback(cancel.set)  # if this thread fails, running lines end at once
            answer = partial(_answer, engine, form, chat=chat, rounds=rounds, cancel=cancel)
            running = takewhile(lambda _line: not cancel.is_set(), todo)
            records = filter(None, in_order(answer, running, setup.file.runtime.max_requests))
            for record in records:
                results.append(record)
                answered[record["line"]] = record.get("error")
                if problem := record.get("error"):
                    failed += 1
                    progress.console.print(f"line {record['line']}: {problem}", soft_wrap=True)
                progress.advance(task)
            results.tidy()
            ran = f"; strategy {engine.strategy.name}"
            if len(answered) < len(lines):
                progress.console.print(RESUMABLE)
                return INTERRUPTED
    tell(f"{count(len(lines), 'line')}: {len(lines) - failed} answered, {failed} failed{ran}")
    return FAILED if failed else 0


def _divide(
    lines: Sequence[Line], done: Sequence[dict[str, Any]]
) -> tuple[dict[int, str | None], list[Line]]:
    """Return the errors (or None) of finished lines, by number, and the lines to answer."""
    errors = {record["line"]: record.get("error") for record in done}
    todo = [
        line
        for line in lines
        if line.number not in errors or (line.problem is None and is_lost(errors[line.number]))
    ]
    for line in todo:
        errors.pop(line.number, None)
    return errors, todo


def _check(config: AdaFuseConfig, lines: Sequence[Line], flags: Namespace) -> None:
    if config.counted_logprobs is not None and not flags.rounds:
        raise InvalidOptionError(
            "options 'logprobs' and 'top_logprobs': the rounds hold them, so also pass --rounds"
        )
    for line in lines:
        if line.messages is not None and (flags.prompts or flags.template):
            raise InvalidInputError(
                "--prompts and --template are for questions, and line "
                f"{line.number} of the test set has messages: leave them out, or put the text "
                "into the messages"
            )


def _answer(
    engine: AdaFuseEngine, form: str, line: Line, *, chat: bool, rounds: bool, cancel: Event
) -> dict[str, Any] | None:
    """Return the result of a line; None if the run was interrupted. `form`: see `prompt_form`."""
    record: dict[str, Any] = {
        "line": line.number,
        "question": line.question,
        "pred": "",
        "label": line.label,
        "finish_reason": "error",
    }
    if line.problem is not None:
        return {**record, "error": one_line(line.problem)}
    request: dict[str, Any] = {"messages": line.messages}
    if line.messages is None:
        request = put(form.replace("{question}", line.question or ""), chat=chat)
    if (seed := engine.config.seed) is not None:
        # every line has its own seed, so that answers do not depend on each other
        request["seed"] = derived_seed(seed, f"question {line.number}")
    try:
        generation = engine.generate(**request, cancel=cancel)
    except Exception as error:  # an error in one line must not stop the others
        return {**record, "error": one_line(f"{type(error).__name__}: {error}")}
    responses = [generation, *generation.alternatives]
    if any(each.finish_reason == "cancelled" for each in responses):
        return None
    first, *others = [_fields(each, rounds) for each in responses]
    return {**record, **first, **({"alternatives": others} if others else {})}


def _fields(generation: Generation, rounds: bool) -> dict[str, Any]:
    optional = {
        "confidence": generation.confidence,
        "reasoning": generation.reasoning or None,
        "seed": generation.seed,
    }
    return {
        "pred": generation.answer.strip(),
        "finish_reason": generation.finish_reason,
        "strategy": generation.strategy,
        "logprob": generation.logprob,
        **{name: value for name, value in optional.items() if value is not None},
        **(generation.model_dump(mode="json", include={"rounds", "usage"}) if rounds else {}),
    }


COMMAND = Command(
    run,
    add_flags,
    defaults={"stop": ("\nQuestion:",)},  # a base model often writes a question after its answer
)
