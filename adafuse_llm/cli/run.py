"""`adafuse run`: answer a test set of questions and write one result per line to a file."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    Generation,
    InvalidInputError,
    InvalidOptionError,
)
from adafuse_llm.cli.common import FAILED, FILE, INTERRUPTED, RESUMABLE, Setup, check_logprobs
from adafuse_llm.cli.terminal import cancel_on_interrupt, one_line, progress_bar
from adafuse_llm.evaluation.files import (
    Line,
    Results,
    is_lost,
    prompt_form,
    put,
    read_lines,
)
from adafuse_llm.evaluation.parallel import in_order
from adafuse_llm.sampling import derived_seed

DEFAULTS: dict[str, Any] = {"stop": ("\nQuestion:",)}
"""Default options. A base model often writes a question after its answer, so stop there."""


def run(
    setup: Setup,
    *,
    test_set: Annotated[
        Path,
        typer.Option(
            help='JSON lines with "question" and "answer", or with "messages" and "answer".', **FILE
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="File of results to write (JSON lines).", dir_okay=False)
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Text file with instructions and examples to put before every question.", **FILE
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help=r"Template of a question, with {question}. \n is a line break. Default: the form "
            r"of the examples in --prompts, otherwise 'Question: {question}\nAnswer:'."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a chat message.")
    ] = False,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="Add the rounds and the usage to every result.")
    ] = False,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Number of lines to answer at the same time.")
    ] = 16,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again and discard existing results.")
    ] = False,
) -> int:
    """Answer a test set and write one result per line. A run can be interrupted and resumed.

    The prompt is the text of --prompts, a blank line, and the question. With --chat, the prompt is
    sent as one user message, which each member reads in its own chat template. A line with messages
    (objects with role and content) is sent as it is.

    A result has the fields line, question, pred (the answer without surrounding whitespace), label,
    finish_reason and strategy. If the members reasoned, the field reasoning has the text before the
    answer. If the answer was drawn (--temperature), the field seed has its seed, which is derived
    from --seed and the line's number; without --seed, the run draws one seed and records it. With
    --n, the field alternatives has the other answers. If a line fails, finish_reason is "error",
    and the field error gives the reason.

    Several lines are answered at the same time (--max-requests) and share forward passes. Every
    result is written at once, also those that are complete when you press Ctrl-C. To resume, run
    the same command again: it answers the lines without a result, and retries lines that failed
    because of the run (for example because memory ran out). OUTPUT.run.json records the settings,
    so that a run with other settings cannot continue the file.

    Exit codes: 0 all lines answered; 1 some failed; 2 nothing could be run; 130 interrupted.
    """
    form = prompt_form(prompts, template)
    content = test_set.read_bytes()
    lines = read_lines(content, conversations=True)
    if form_flags := [
        flag for flag, value in (("--prompts", prompts), ("--template", template)) if value
    ]:
        _refuse_conversations(lines, form_flags[0])
    _check_options(setup.config, lines, rounds=rounds)
    results = Results(output)
    if output.exists() and any(output.samefile(path) for path in (test_set, prompts) if path):
        raise InvalidInputError(f"--output {output} is also an input file; choose another output")
    setup = dataclasses.replace(setup, config=results.seeded(setup.config, overwrite=overwrite))
    identity = {
        "test set": hashlib.sha256(content).hexdigest(),
        "prompts": form,
        "models": list(setup.models) or "embedded",
        "dtype": setup.dtype,
        "revision": setup.revision,
        "device_map": setup.device_map,
        "rounds": rounds,
        "strategy": setup.strategy,
        **({"chat": True} if chat else {}),
        **setup.config.model_dump(mode="json"),
    }
    numbers = {line.number for line in lines}
    done = [] if overwrite else results.done(identity, numbers)
    answered, todo = _divide(lines, done)
    with ExitStack() as stack:
        if todo:
            stack.enter_context(results.lock())
            # another process may have written results before this one had the lock
            done = [] if overwrite else results.done(identity, numbers)
            answered, todo = _divide(lines, done)
        failed = sum(error is not None for error in answered.values())
        if done:
            typer.echo(f"resuming: {len(answered)} of {len(lines)} lines are done", err=True)
        if todo:
            engine = stack.enter_context(setup.engine(max_requests=max_requests))
            cancel = stack.enter_context(cancel_on_interrupt())
            progress = stack.enter_context(progress_bar())
            results.begin(identity, afresh=not done)
            task = progress.add_task(test_set.name, total=len(lines), completed=len(answered))
            stack.callback(cancel.set)  # if this thread fails, the lines that run end at once
            answer = partial(_answer, engine, form, chat=chat, rounds=rounds, cancel=cancel)
            running = takewhile(lambda _line: not cancel.is_set(), todo)
            records = filter(None, in_order(answer, running, max_requests))
            for record in records:
                results.append(record)
                answered[record["line"]] = record.get("error")
                if problem := record.get("error"):
                    failed += 1
                    progress.console.print(f"line {record['line']}: {problem}", soft_wrap=True)
                progress.advance(task)
            results.tidy()
            if len(answered) < len(lines):
                progress.console.print(RESUMABLE)
                return INTERRUPTED
    ran = f"; strategy {engine.strategy.name}" if todo else ""
    counts = f"{len(lines) - failed} answered, {failed} failed{ran}"
    typer.echo(f"{len(lines)} lines: {counts}", err=True)
    return FAILED if failed else 0


def _divide(
    lines: Sequence[Line], done: Sequence[dict[str, Any]]
) -> tuple[dict[int, str | None], list[Line]]:
    """Return the errors of the lines that are done, by number, and the lines to answer."""
    errors = {record["line"]: record.get("error") for record in done}
    todo = [
        line
        for line in lines
        if line.number not in errors or (line.problem is None and is_lost(errors[line.number]))
    ]
    for line in todo:
        errors.pop(line.number, None)
    return errors, todo


def _refuse_conversations(lines: Sequence[Line], flag: str) -> None:
    """Raise an error if a flag for questions is given with lines that have messages."""
    for line in lines:
        if line.messages is not None:
            raise InvalidInputError(
                f"{flag} is for questions, and line {line.number} of the test set has messages: "
                "leave the flag out, or put the text into the messages"
            )


def _check_options(config: AdaFuseConfig, lines: Sequence[Line], *, rounds: bool) -> None:
    """Raise an error if an option does not fit the lines or the other flags."""
    check_logprobs(config, rounds=rounds)
    for line in lines if config.continue_final_message else ():
        if line.messages is None and line.problem is None:
            raise InvalidOptionError(
                "option 'continue_final_message': it needs messages, and line "
                f"{line.number} of the test set has a question; got True"
            )


def _request(line: Line, form: str, *, chat: bool) -> dict[str, Any]:
    """Return the engine's arguments for a line. `form` is the prompt, with ``{question}``."""
    if line.messages is not None:
        return {"messages": line.messages}
    return put(form.replace("{question}", line.question or ""), chat=chat)


def _answer(
    engine: AdaFuseEngine, form: str, line: Line, *, chat: bool, rounds: bool, cancel: Event
) -> dict[str, Any] | None:
    """Return the result of a line, or None if the run was interrupted."""
    record: dict[str, Any] = {
        "line": line.number,
        "question": line.question,
        "pred": "",
        "label": line.label,
        "finish_reason": "error",
    }
    if line.problem is not None:
        return {**record, "error": one_line(line.problem)}
    seed = engine.config.seed
    # with one seed for all lines, the answers would depend on each other
    options: dict[str, Any] = {}
    if seed is not None:
        options["seed"] = derived_seed(seed, f"question {line.number}")
    request = _request(line, form, chat=chat)
    try:
        generation = engine.generate(**request, cancel=cancel, **options)
    except Exception as error:  # an error in one line must not stop the others
        return {**record, "error": one_line(f"{type(error).__name__}: {error}")}
    responses = [generation, *generation.alternatives]
    if any(each.finish_reason == "cancelled" for each in responses):
        return None
    first, *others = [_fields(each, rounds) for each in responses]
    return {**record, **first, **({"alternatives": others} if others else {})}


def _fields(generation: Generation, rounds: bool) -> dict[str, Any]:
    """Return the fields of a result that describe one response."""
    fields: dict[str, Any] = {
        "pred": generation.answer.strip(),
        "finish_reason": generation.finish_reason,
        "strategy": generation.strategy,
    }
    if generation.reasoning:
        fields["reasoning"] = generation.reasoning
    if generation.seed is not None:
        fields["seed"] = generation.seed
    if rounds:
        fields |= generation.model_dump(mode="json", include={"rounds", "usage"})
    return fields
