"""`adafuse eval`: answer a benchmark, score it and compare systems."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidInputError
from adafuse_llm.cli.common import FAILED, FILE, INTERRUPTED, RESUMABLE, Setup, check_logprobs
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    interruptible,
    one_line,
    print_json,
    progress_bar,
    stdout_console,
)
from adafuse_llm.evaluation.files import Results, read_text
from adafuse_llm.evaluation.metrics import Metric, load_metric
from adafuse_llm.evaluation.runner import (
    Evaluation,
    Record,
    System,
    answer_all,
    compared,
    form_options,
    lost,
    merged,
    missed,
    read_records,
    singly,
    unanswered,
)
from adafuse_llm.evaluation.statistics import Comparison, Score, p_value
from adafuse_llm.evaluation.tasks import Question, Task, load_task
from adafuse_llm.report.page import count
from adafuse_llm.report.styles import printable

OPEN: dict[str, Any] = {"stop": None, "max_new_tokens": None}
"""Options that the task sets unless a flag sets them."""

REFUSED = {
    "n": "an evaluation scores one response to each question; for others, run it again with "
    "another --seed and --output",
    "continue_final_message": "the messages of an evaluation end with the question",
}
"""Options that this command refuses, with the reason."""

MAX_REQUESTS = 16
"""Default number of questions that are answered at the same time."""


class _Interrupted(Exception):  # noqa: N818
    """The run was interrupted. The file has the records so far."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The questions, the form of their prompts, and the identity that a resumed run must match."""

    task: Task
    questions: Sequence[Question]
    metrics: Sequence[Metric]
    header: str
    form: str
    chat: bool
    rounds: bool
    overwrite: bool
    config: AdaFuseConfig
    identity: dict[str, Any]

    def singly(self) -> Job:
        """Return a copy of this job in which each member answers alone."""
        identity = {**self.identity, "strategy": "single"}
        return dataclasses.replace(self, config=form_options(self.config), identity=identity)


def evaluate(
    setup: Setup,
    *,
    output: Annotated[
        Path, typer.Option(help="File of results to write (JSON lines).", dir_okay=False)
    ],
    task: Annotated[
        str,
        typer.Option(
            help="Task: nq, squad, triviaqa, gsm8k, flores_en_de, flores_de_en, embedded.",
            metavar="NAME",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines with "question" and "answer". Not needed for --task embedded.', **FILE
        ),
    ] = None,
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
            "of the examples in --prompts, otherwise the task's template."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Send the prompt as a chat message. The task embedded always does this."
        ),
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N questions.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Metric to compute. Repeatable. Default: the task's metrics.", metavar="NAME"
        ),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Also run every member alone and compare the ensemble to it."),
    ] = False,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="File with results of another run to compare with. Repeatable.", **FILE),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Number of questions to answer at the same time.")
    ] = MAX_REQUESTS,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="Add the rounds to every result.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again and discard existing results.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Answer a benchmark. Print strict metrics with 95 % intervals, the cost, and paired tests.

    Each result is written as soon as it is ready, one line per question: the response, the answer
    extracted from it, every metric, the seconds, and the passes and tokens of each member. With
    --alone, the results of the members are written to OUTPUT.MEMBER.jsonl. The task sets --stop and
    --max-new-tokens unless you pass them.

    With --temperature, the response to a question has a seed that is derived from --seed and the
    number of the question. Without --seed, the run draws one seed and records it.

    To resume after an interruption, run the same command again. If all questions are answered, the
    command only prints the summary again.

    Exit codes: 0 all questions answered; 1 some failed; 2 nothing could be run; 130 interrupted.
    Failed questions count as wrong. If some failed because of the run (for example because memory
    ran out), the results are not compared. Run the same command again to retry these questions.
    """
    job = prepare(
        setup,
        task=task,
        data=data,
        prompts=prompts,
        template=template,
        limit=limit,
        metric=metric,
        rounds=rounds,
        overwrite=overwrite,
        chat=chat,
        max_requests=max_requests,
    )
    read = [path for path in (data, prompts, *(compare or ())) if path is not None]
    if any(Results(output).is_at(path) for path in read):
        raise InvalidInputError(f"--output {output} is also an input file; choose another output")
    others = {str(path): read_records(path) for path in compare or ()}
    check_logprobs(job.config, rounds=rounds)
    config = Results(output).seeded(job.config, overwrite=overwrite)
    job = dataclasses.replace(job, config=config)
    setup = dataclasses.replace(setup, config=config)
    found: dict[str, list[Record]] = {}
    try:
        with ExitStack() as stack, cancel_on_interrupt() as cancel:
            engines = _Engines(setup, max_requests, stack)
            ensemble = System()
            found[ensemble.name] = _run(job, ensemble, output, engines.together, cancel)
            members = _members(found[ensemble.name], engines) if alone else ()
            for member in members:
                path = output.with_name(f"{output.stem}.{_safe(member)}{output.suffix}")
                if any(Results(path).is_at(each) for each in read):
                    raise InvalidInputError(
                        f"{path}, the output for {member} alone, is also an input file"
                    )
                single = System.alone(member)
                found[single.name] = _run(job.singly(), single, path, engines.singly, cancel)
    except _Interrupted:
        typer.echo(RESUMABLE, err=True)
        return INTERRUPTED
    evaluations = [
        Evaluation.of(records, job.metrics, task=job.task.name, system=name)
        for name, records in found.items()
    ]
    for name, records in found.items():
        if warning := missed(records, job.metrics[0].name):
            typer.echo(f"warning: {name}: {warning}", err=True)
    ours = next(iter(found.values()))
    theirs = {**{name: found[name] for name in list(found)[1:]}, **others}
    failed = {name: lost(ours) + lost(each) for name, each in theirs.items()}
    comparisons = {
        name: [] if failed[name] else compared(ours, each, job.metrics)
        for name, each in theirs.items()
    }
    if as_json:
        print_json(
            {
                "evaluations": [each.model_dump(mode="json") for each in evaluations],
                "comparisons": {
                    name: [each.model_dump(mode="json") for each in found]
                    for name, found in comparisons.items()
                },
            }
        )
    else:
        stdout_console().print(_shown(evaluations, comparisons, failed))
    return FAILED if any(each.failed for each in evaluations) else 0


def prepare(
    setup: Setup,
    *,
    task: str,
    data: Path | None,
    prompts: Path | None,
    template: str | None,
    limit: int | None,
    metric: Sequence[str] | None,
    rounds: bool,
    overwrite: bool,
    chat: bool,
    max_requests: int,
) -> Job:
    """Return the job after checking the flags and reading the files. Load no model."""
    found = load_task(task)
    content = None if data is None else data.read_bytes()
    questions = found.questions(content, limit)
    header, form = found.header_and_form(
        None if prompts is None else read_text(prompts),
        None if template is None else template.replace("\\n", "\n"),
    )
    config = AdaFuseConfig(**{**found.options, **setup.options})
    names = list(metric or found.metrics)
    identity = {
        "task": found.name,
        "test set": "embedded" if content is None else hashlib.sha256(content).hexdigest(),
        "prompts": hashlib.sha256(header.encode()).hexdigest(),
        "template": form,
        "metrics": names,
        "models": list(setup.models) or "embedded",
        "strategy": setup.strategy,
        "dtype": setup.dtype,
        "revision": setup.revision,
        "device_map": setup.device_map,
        "rounds": rounds,
        "max_requests": max_requests,
        **({"chat": True} if chat and found.reads_file else {}),
    }
    return Job(
        task=found,
        questions=questions,
        metrics=[load_metric(each) for each in names],
        header=header,
        form=form,
        chat=chat,
        rounds=rounds,
        overwrite=overwrite,
        config=config,
        identity=identity,
    )


class _Engines:
    """The engines, created on first use."""

    def __init__(self, setup: Setup, max_requests: int, stack: ExitStack) -> None:
        self._setup, self._most, self._stack = setup, max_requests, stack

    @cached_property
    def _together(self) -> AdaFuseEngine:
        with interruptible():
            return self._stack.enter_context(self._setup.engine(max_requests=self._most))

    @cached_property
    def _singly(self) -> AdaFuseEngine:
        return self._stack.enter_context(singly(self._together))

    def together(self) -> AdaFuseEngine:
        """Return the engine of the ensemble."""
        return self._together

    def singly(self) -> AdaFuseEngine:
        """Return the engine in which each member answers alone."""
        return self._singly


def _run(
    job: Job, system: System, path: Path, engine: Callable[[], AdaFuseEngine], cancel: Event
) -> list[Record]:
    """Answer the questions that lack a record, and return all records of a system."""
    results = Results(path)
    options = job.config.override(system.options).model_dump(mode="json")
    identity = {**job.identity, **options}
    done = _done(job, results, identity)
    if not unanswered(job.questions, done):
        return done
    with results.lock():
        # another process may have written results before this one had the lock
        done = _done(job, results, identity)
        new = _answer(
            job, system, results, identity=identity, done=done, engine=engine, cancel=cancel
        )
        return merged(done, new)


def _done(job: Job, results: Results, identity: dict[str, Any]) -> list[Record]:
    """Return the records that a run continues with."""
    numbers = [question.number for question in job.questions]
    return [] if job.overwrite else [Record(**each) for each in results.done(identity, numbers)]


def _answer(
    job: Job,
    system: System,
    results: Results,
    *,
    identity: dict[str, Any],
    done: Sequence[Record],
    engine: Callable[[], AdaFuseEngine],
    cancel: Event,
) -> list[Record]:
    """Answer the questions that lack a record, write the new records, and return them."""
    todo = unanswered(job.questions, done)
    total = len(job.questions)
    there = total - len(todo)
    if done:
        typer.echo(f"{results.path}: resuming, {there} of {total} are done", err=True)
    running = answer_all(
        engine(),
        job.task,
        todo,
        job.metrics,
        system=system,
        header=job.header,
        form=job.form,
        chat=job.chat,
        rounds=job.rounds,
        cancel=cancel,
    )
    results.begin(identity, afresh=not done)
    new = []
    with progress_bar() as progress:
        shown = progress.add_task(system.name, total=total, completed=there)
        for record in running:
            results.append(record.model_dump(mode="json", exclude_none=True))
            if record.error is not None:
                progress.console.print(f"line {record.line}: {one_line(record.error)}")
            progress.advance(shown)
            new.append(record)
    if len(new) < len(todo):
        raise _Interrupted
    results.tidy()
    return new


def _members(records: Sequence[Record], engines: _Engines) -> Sequence[str]:
    """Return the members that took part. Load models only if no record names the members."""
    for record in records:
        if record.usage is not None:
            return tuple(record.usage.forward_passes)
    return engines.together().config.use or engines.together().members


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _shown(
    evaluations: Sequence[Evaluation],
    comparisons: dict[str, list[Comparison]],
    failed: dict[str, int],
) -> Group:
    first = evaluations[0]
    title = Text(f"{first.task}: {count(first.answers, 'question')}", "bold")
    title.append("; scores in percent, with 95 % intervals", "not bold dim")
    scores = [
        (name, each.system, each.scores[name]) for name in first.scores for each in evaluations
    ]
    groups = [
        (name.replace("_", " "), each.system, each.groups[name])
        for name in first.groups
        for each in evaluations
    ]
    parts: list[Any] = [title, _scores("metric", scores)]
    if groups:
        title = Text(f"{next(iter(first.scores))} by group", "bold")
        parts += ["", title, _scores("group", groups)]
    costs = Text("Cost of an answer", "bold").append("; all members together", "not bold dim")
    parts += ["", costs, _costs(evaluations)]
    for name, found in comparisons.items():
        parts += ["", Text(f"{first.system} against {printable(name)}", "bold")]
        if found:
            parts += [*_comparison(found), Text(verdict(name, found[0]))]
        else:
            parts.append(Text(_not_compared(name, failed[name])))
    return Group(*parts)


def _table(*columns: tuple[str, Literal["left", "right"]]) -> Table:
    """Return an empty table. Only the column of the systems wraps."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, justify in columns:
        system = name == "system"
        table.add_column(name, justify=justify, no_wrap=not system, overflow="fold")
    return table


def _scores(what: str, scores: Sequence[tuple[str, str, Score]]) -> Table:
    """Return a table of scores with their labels and systems. `what` is the name of the labels."""
    table = _table((what, "left"), ("system", "left"), ("score", "left"))
    last = None
    for label, system, score in scores:
        shown = "" if label == last else printable(label)
        table.add_row(shown, printable(system), score.shown())
        last = label
    return table


def _costs(evaluations: Sequence[Evaluation]) -> Table:
    numbers = ("seconds", "tokens", "passes", "failed")
    table = _table(("system", "left"), *((name, "right") for name in numbers))
    for each in evaluations:
        table.add_row(
            printable(each.system),
            f"{each.seconds:.2f}",
            f"{each.tokens:.0f}",
            f"{sum(each.forward_passes.values()):.1f}",
            str(each.failed),
        )
    return table


def _comparison(found: Sequence[Comparison]) -> list[Any]:
    """Return a table of the comparisons with one system, and the tests that were used."""
    numbers = ("ours", "theirs", "difference", "p")
    table = _table(("metric", "left"), *((name, "right") for name in numbers))
    tests: dict[str, list[str]] = {}
    for each in found:
        difference = each.difference.shown("+")
        values = f"{each.ours:.1f}", f"{each.theirs:.1f}", difference, p_value(each.p_value)
        table.add_row(each.metric, *values)
        tests.setdefault(each.test, []).append(each.metric)
    used = "; ".join(f"{test} for {', '.join(metrics)}" for test, metrics in tests.items())
    return [table, Text(f"{count(found[0].questions, 'question')}; {used}", "dim")]


def _not_compared(name: str, failed: int) -> str:
    return (
        f"Not compared with {printable(name)}: {count(failed, 'answer')} failed. To retry, repeat "
        "the command that wrote them."
    )


def verdict(name: str, found: Comparison) -> str:
    """Return the result of a comparison as a sentence."""
    if found.verdict == "not shown":
        return (
            f"The difference from {printable(name)} ({found.metric}) is not significant "
            f"({found.chance})."
            + (f" About {found.needed} questions would show one this large." * bool(found.needed))
        )
    return (
        f"The score ({found.metric}) is {found.verdict} that of {printable(name)} ({found.chance})."
    )
