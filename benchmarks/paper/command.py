"""Run a suite, resume it, show it: what `python -m benchmarks.paper` does."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidInputError
from adafuse_llm.cli.common import (
    FAILED,
    INTERRUPTED,
    Setup,
    cancel_on_interrupt,
    interruptible,
    one_line,
    print_json,
    progress_bar,
    stdout_console,
)
from adafuse_llm.evaluation.runner import Record
from adafuse_llm.report.looks import printable
from benchmarks.paper.layout import OF_TASKS, Part, Suite, load_suite, parts_of
from benchmarks.paper.page import suite_page
from benchmarks.paper.report import Report, make_report, verdicts
from benchmarks.paper.run import (
    Cancelled,
    Job,
    Runner,
    Work,
    chosen_members,
    jobs_of,
    load_work,
)
from benchmarks.paper.sheets import Sheet, sheets


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What was typed, checked."""

    name: str
    suite: Suite
    works: dict[str, Work]
    absent: dict[str, str]
    output: Path


def run_suite(
    setup: Setup,
    *,
    suite: Annotated[str, typer.Argument(help="paper, or a YAML file.", metavar="SUITE")] = "paper",
    output: Annotated[Path, typer.Option(help="Folder of answers, suite.json and suite.html.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with TASK.jsonl and TASK.prompt.txt. Default: the embedded questions.",
            exists=True,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Run only this one: nq, squad, triviaqa, gsm8k, flores_en_de, flores_de_en, "
            "embedded."
        ),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Repeatable. Default: those of the tasks.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Use only the first N questions of each task.", metavar="N"),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Questions that are answered at the same time. Default: the suite's, which is 16.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send the prompt as a message; embedded always does."),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Page to write. Default: suite.html in the folder.", dir_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Run the AdaFuse paper's tables and figures, with paired tests.

    Runs members alone, other strategies and AdaFuse, and tests whether AdaFuse is above them; on
    the embedded members, or on a folder of the paper's benchmarks (--data). The output folder
    holds every answer, suite.json and suite.html. The same command resumes where it was
    interrupted, and prints the tables again when all is done.

    Exit codes: 0 all questions answered; 1 some failed (they count as wrong; those that failed of
    the run, out of memory, say, are asked again by the same command, and until then nothing is
    compared); 2 nothing could be run; 130 interrupted.
    """
    wanted, setup = _wanted(
        setup,
        name=suite,
        output=output,
        data=data,
        tasks=[] if task is None else [task],
        metrics=metric or [],
        limit=limit,
        max_requests=max_requests,
        chat=chat,
    )
    for name, reason in wanted.absent.items():
        typer.echo(f"{name} is left out: {reason}", err=True)
    with ExitStack() as stack, cancel_on_interrupt() as cancel:
        engine = _Lazily(setup, stack)
        notes = Notes(output)
        members = _members(notes, setup, engine)
        parts = parts_of(wanted.suite, members)
        runner = Runner(
            engine,
            output,
            wanted.works,
            wanted.suite,
            identity={
                "models": list(setup.models) or "embedded",
                "dtype": setup.dtype,
                "revision": setup.revision,
                "device_map": setup.device_map,
            },
            members=None if setup.config.use is None else members,
        )
        jobs, refused = _possible(runner, jobs_of(parts, wanted.suite, wanted.works))
        _tell_absent(parts, refused)
        answers: dict[tuple[str, str, bool], list[Record]] = {}
        with progress_bar() as progress:
            total = sum(job.questions for job in jobs)
            left = sum(runner.missing(job) for job in jobs)
            shown = progress.add_task(wanted.name, total=total, completed=total - left)
            if left < total:
                typer.echo(f"{output}: {total - left} of {total} answers are there", err=True)

            def came(record: Record) -> None:
                progress.advance(shown)
                if record.error is not None:
                    progress.console.print(f"line {record.line}: {one_line(record.error)}")

            for job in jobs:
                try:
                    if not runner.missing(job):
                        answers[job.name] = runner.records(job)
                        continue
                    with notes.run():
                        answers[job.name] = runner.records(job, cancel=cancel, came=came)
                except Cancelled:
                    typer.echo("interrupted: the same command resumes", err=True)
                    return INTERRUPTED
    about = _about(wanted, setup, members) | notes.provenance
    about["processor_seconds"] = notes.processor_seconds
    report = make_report(wanted.suite, parts, wanted.works, answers, refused=refused, about=about)
    text = report.model_dump_json(indent=1) + "\n"
    (output / "suite.json").write_text(text, encoding="utf-8")
    page = html or output / "suite.html"
    page.write_text(suite_page(report), encoding="utf-8")
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        stdout_console().print(Group(*_shown(report)))
        typer.echo(f"{output / 'suite.json'} and {page} hold the same, with charts", err=True)
    failed = any(record.error is not None for each in answers.values() for record in each)
    return FAILED if failed else 0


def _wanted(
    setup: Setup,
    *,
    name: str,
    output: Path,
    data: Path | None,
    tasks: Sequence[str],
    metrics: Sequence[str],
    limit: int | None,
    max_requests: int | None,
    chat: bool,
) -> tuple[Wanted, Setup]:
    """Check the arguments before a model is loaded; what to run, and with which members."""
    suite = load_suite(name).limited(limit)
    if max_requests is not None:
        suite = suite.model_copy(update={"max_requests": max_requests})
    if chat:
        suite = suite.model_copy(update={"chat": True})
    own = AdaFuseConfig()
    taken = ", ".join("--" + each.replace("_", "-") for each in OF_TASKS)
    for option, value in setup.options.items():
        if option not in OF_TASKS and value != getattr(own, option):
            raise InvalidInputError(
                f"--{option.replace('_', '-')} is said by the rows of a suite; of the options of "
                f"decoding it takes {taken}. For other rows, write a suite file."
            )
    if setup.strategy != "adafuse":
        raise InvalidInputError("--strategy is said by the rows of a suite: leave it out")
    if output.exists() and not output.is_dir():
        raise InvalidInputError(f"--output {output} must be a folder for a suite; it is a file")
    given = {
        option: value
        for option, value in setup.options.items()
        if option in OF_TASKS and option != "use"
    }
    works, absent = load_work(suite, data, tasks=tasks, metrics=metrics, options=given)
    setup = dataclasses.replace(
        setup,
        models=setup.models or suite.models,
        dtype=suite.dtype if setup.dtype == "auto" else setup.dtype,
        device_map=setup.device_map or suite.device_map,
    )
    return Wanted(name, suite, works, absent, output), setup


class _Lazily:
    """The engine with all members, loaded when it is first needed."""

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        plain = dataclasses.replace(setup, config=AdaFuseConfig())
        self._setup, self._stack = plain, stack

    @cached_property
    def _engine(self) -> AdaFuseEngine:
        with interruptible():
            return self._stack.enter_context(self._setup.engine())

    def __call__(self) -> AdaFuseEngine:
        return self._engine


class Notes:
    """What a folder remembers of its runs, beside the answers."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "notes.json"
        try:
            self._told = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._told = {}

    def members(self, asked: dict[str, Any]) -> tuple[str, ...] | None:
        """The members of an earlier run that asked for the same."""
        same = self._told.get("asked") == json.loads(json.dumps(asked))
        return tuple(self._told["members"]) if same else None

    @property
    def processor_seconds(self) -> float:
        """Processor time of decoding, all runs together."""
        return float(self._told.get("processor_seconds", 0.0))

    def note(self, **told: Any) -> None:
        """Remember something."""
        self._told |= told
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._told) + "\n", encoding="utf-8")

    @contextmanager
    def run(self) -> Iterator[None]:
        """While something is decoded: adds the processor time of this process, and notes when,
        with which version and on what it was.
        """
        before = time.process_time()
        try:
            yield
        finally:
            taken = time.process_time() - before
            made = {"version": version("adafuse-llm"), "machine": _machine()}
            others = [
                each for each in self._made if {**each, "date": None} != {**made, "date": None}
            ]
            self.note(
                processor_seconds=round(self.processor_seconds + taken, 2),
                made=[*others, {**made, "date": _now()}],
            )

    @property
    def _made(self) -> list[dict[str, str]]:
        """Version, machine and last date of the runs that decoded something."""
        found: list[dict[str, str]] = self._told.get("made", [])
        return found

    @property
    def provenance(self) -> dict[str, str]:
        """Of all answers: the date of the last, every version and machine."""
        made = self._made or [
            {"version": version("adafuse-llm"), "machine": _machine(), "date": _now()}
        ]
        return {
            "date": max(each["date"] for each in made),
            "version": ", ".join(dict.fromkeys(each["version"] for each in made)),
            "machine": "; ".join(dict.fromkeys(each["machine"] for each in made)),
        }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _machine() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {version('torch')}, transformers {version('transformers')}"
    )


def _members(notes: Notes, setup: Setup, engine: _Lazily) -> tuple[str, ...]:
    """The members that take part: as an earlier run has noted them, so that nothing need be loaded
    to show it again.
    """
    asked = {"models": list(setup.models), "members": setup.config.use}
    known = notes.members(asked)
    if known is None:
        known = chosen_members(engine(), setup.config.use)
        notes.note(asked=asked, members=known)
    return known


def _possible(runner: Runner, jobs: Sequence[Job]) -> tuple[list[Job], dict[str, str]]:
    """The jobs that can be run, and rows that cannot, by their key, with the reason."""
    refused = {}
    for job in jobs:
        if job.row.key not in refused and (reason := runner.refusal(job)) is not None:
            refused[job.row.key] = reason
    return [job for job in jobs if job.row.key not in refused], refused


def _tell_absent(parts: Sequence[Part], refused: dict[str, str]) -> None:
    told = {row.name: refused[row.key] for part in parts for row in part.rows if row.key in refused}
    for part in parts:
        told |= part.absent
    for name, reason in told.items():
        typer.echo(f"{name} is left out: {one_line(reason)}", err=True)


def _about(wanted: Wanted, setup: Setup, members: Sequence[str]) -> dict[str, Any]:
    return {
        "suite": wanted.name,
        "command": shlex.join(["python", "-m", "benchmarks.paper", *sys.argv[1:]]),
        "models": setup.models,
        "members": tuple(members),
        "max_requests": wanted.suite.max_requests,
        "absent": wanted.absent,
    }


def _shown(report: Report) -> Iterator[RenderableType]:
    for sheet in sheets(report):
        yield Text(printable(sheet.title), "bold")
        yield _table(sheet)
        yield Padding(Text(printable(sheet.note), "dim"), (0, 0, 1, 0))
    for trace in report.traces:
        yield Text(f"Example 1: an answer of {trace.system} ({trace.task}), by round", "bold")
        yield Text(printable(f"{trace.question}\n{trace.bracketed}\n"))
    if report.claims:
        yield Text("Does it pay?", "bold")
        for sentence in verdicts(report):
            yield Text(printable(sentence))


def _table(sheet: Sheet) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for place, column in enumerate(sheet.columns):
        table.add_column(printable(column), justify="left" if place < sheet.names else "right")
    for row in sheet.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
