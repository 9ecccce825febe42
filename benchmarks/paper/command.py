"""The command `python -m benchmarks.paper`, which runs, resumes and shows a suite."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from adafuse_llm.cli.common import FAILED, INTERRUPTED, RESUMABLE, Setup
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    one_line,
    print_json,
    progress_bar,
    stdout_console,
)
from adafuse_llm.report.styles import printable
from benchmarks.paper.arguments import (
    Arguments,
    Given,
    LazyEngine,
    check_arguments,
    make_runner,
)
from benchmarks.paper.layout import SUITES, Part, parts_of
from benchmarks.paper.page import suite_page
from benchmarks.paper.report import Report, make_report, verdicts
from benchmarks.paper.run import Cancelled, Job, Runner, chosen_members, jobs_of
from benchmarks.paper.runner import Record
from benchmarks.paper.sheets import Sheet, sheets
from benchmarks.paper.workers import decode_in_processes


def run_suite(
    setup: Setup,
    *,
    suite: Annotated[
        str, typer.Option(help=f"{', '.join(SUITES)}, or the path of a YAML file.", metavar="NAME")
    ] = "paper",
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for answers, suite.json and suite.html. Default: results/NAME.",
            metavar="FOLDER",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with TASK.jsonl and TASK.prompt.txt. Default: the embedded questions.",
            metavar="FOLDER",
            exists=True,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Run only this task: nq, squad, triviaqa, gsm8k, flores_en_de, flores_de_en, "
            "embedded, or one with long answers, such as embedded_parts.",
            metavar="NAME",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Main metric. Repeatable. Default: the main metric of each task.", metavar="NAME"
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Use only the first N questions of each task."),
    ] = None,
    first: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of the first question of each task. Default: the number in the suite, "
            "usually 1.",
        ),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of concurrent questions. Default: the number in the suite, usually 16.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of processes that decode, except in parts that measure time. Each loads "
            "the members. Default: the number in the suite, 2 in long and otherwise 1.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send prompts as messages. Embedded tasks choose themselves."),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write. Default: suite.html in the output folder.", dir_okay=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Make the AdaFuse paper's tables and figures, with paired tests.

    The command answers questions with single members, other strategies and AdaFuse. It tests
    whether AdaFuse scores higher. The questions are the embedded ones, or come from a folder of the
    paper's benchmarks (--data). The suite long asks embedded questions with long answers. The
    output folder holds every answer, suite.json and suite.html. Run the same command again to
    resume after an interruption, or to print the tables again.

    Exit codes: 0 all questions answered; 1 some failed; 2 nothing could be run; 130 interrupted. A
    failed answer counts as wrong. If the run caused the failure, for example because memory ran
    out, the same command repeats the question. Until then the system is not compared.
    """
    given: Given = {
        "suite": suite,
        "output": output,
        "data": data,
        "tasks": [] if task is None else [task],
        "metrics": metric or [],
        "limit": limit,
        "first": first,
        "max_requests": max_requests,
        "workers": workers,
        "chat": chat,
    }
    asked = setup
    arguments, setup = check_arguments(asked, given)
    for name, reason in arguments.absent.items():
        typer.echo(f"{name} is left out: {reason}", err=True)
    with ExitStack() as stack, cancel_on_interrupt() as cancel:
        engine = LazyEngine(setup, stack)
        output = arguments.output
        notes = Notes(output)
        members = _members(notes, arguments, setup, engine)
        parts = parts_of(arguments.suite, members)
        runner = make_runner(arguments, setup, engine, members)
        jobs, refused = _possible(runner, jobs_of(parts, arguments.suite, arguments.works))
        _report_absent(parts, refused)
        answers: dict[tuple[str, str, bool], list[Record]] = {}
        with progress_bar() as progress:
            total = sum(job.questions for job in jobs)
            left = sum(runner.missing(job) for job in jobs)
            shown = progress.add_task(arguments.name, total=total, completed=total - left)
            if left < total:
                typer.echo(f"{output} has {total - left} of {total} answers", err=True)

            def on_record(record: Record) -> None:
                progress.advance(shown)
                if record.error is not None:
                    progress.console.print(f"line {record.line}: {one_line(record.error)}")

            try:
                shared = [job for job in jobs if not job.timed and runner.missing(job)]
                if shared and arguments.suite.workers > 1:
                    with notes.run() as elsewhere:
                        elsewhere.append(
                            decode_in_processes(
                                shared,
                                arguments.suite.workers,
                                asked,
                                given,
                                members,
                                cancel=cancel,
                                on_answers=lambda number: progress.advance(shown, number),
                            )
                        )
                for job in jobs:
                    if not runner.missing(job):
                        answers[job.name] = runner.records(job)
                        continue
                    with notes.run():
                        answers[job.name] = runner.records(job, cancel=cancel, on_record=on_record)
            except Cancelled:
                typer.echo(RESUMABLE, err=True)
                return INTERRUPTED
    about = _about(arguments, members) | notes.provenance
    about["processor_seconds"] = notes.processor_seconds
    report = make_report(
        arguments.suite, parts, arguments.works, answers, refused=refused, about=about
    )
    text = report.model_dump_json(indent=1) + "\n"
    (output / "suite.json").write_text(text, encoding="utf-8")
    page = html or output / "suite.html"
    page.write_text(suite_page(report), encoding="utf-8")
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        stdout_console().print(Group(*_shown(report)))
        typer.echo(f"wrote {output / 'suite.json'}, and {page} with charts", err=True)
    failed = any(record.error is not None for records in answers.values() for record in records)
    return FAILED if failed else 0


class Notes:
    """Notes in the output folder about earlier runs: members, dates, versions and times."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "notes.json"
        try:
            self._notes = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._notes = {}

    def members(self, request: dict[str, Any]) -> tuple[str, ...] | None:
        """Return the members of an earlier run with the same request, or None."""
        same = self._notes.get("asked") == json.loads(json.dumps(request))
        return tuple(self._notes["members"]) if same else None

    @property
    def processor_seconds(self) -> float:
        """Processor time of decoding in all runs, in seconds."""
        return float(self._notes.get("processor_seconds", 0.0))

    def note(self, **notes: Any) -> None:
        """Add notes and write the file."""
        self._notes |= notes
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._notes) + "\n", encoding="utf-8")

    @contextmanager
    def run(self) -> Iterator[list[float]]:
        """Add the processor time of the ``with`` block. Note date, version and machine.

        The list that it yields takes the processor seconds of other processes.
        """
        before = time.process_time()
        elsewhere: list[float] = []
        try:
            yield elsewhere
        finally:
            taken = time.process_time() - before + sum(elsewhere)
            made = {"version": version("adafuse-llm"), "machine": _machine()}
            others = [
                other for other in self._made if {**other, "date": None} != {**made, "date": None}
            ]
            self.note(
                processor_seconds=round(self.processor_seconds + taken, 2),
                made=[*others, {**made, "date": _now()}],
            )

    @property
    def _made(self) -> list[dict[str, str]]:
        """The versions and machines of runs that decoded answers, each with its last date."""
        made: list[dict[str, str]] = self._notes.get("made", [])
        return made

    @property
    def provenance(self) -> dict[str, str]:
        """The date of the last answer, and all versions and machines that decoded answers."""
        made = self._made or [
            {"version": version("adafuse-llm"), "machine": _machine(), "date": _now()}
        ]
        return {
            "date": max(run["date"] for run in made),
            "version": ", ".join(dict.fromkeys(run["version"] for run in made)),
            "machine": "; ".join(dict.fromkeys(run["machine"] for run in made)),
        }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _machine() -> str:
    import torch

    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {gpu}Python {platform.python_version()}, "
        f"torch {version('torch')}, transformers {version('transformers')}"
    )


def _members(
    notes: Notes, arguments: Arguments, setup: Setup, engine: LazyEngine
) -> tuple[str, ...]:
    """Return the names of the members that take part.

    They come from the notes of an earlier run if possible. Then no model is loaded to show its
    report again.
    """
    request = {"models": list(arguments.models), "members": setup.config.use}
    known = notes.members(request)
    if known is None:
        known = chosen_members(engine(), setup.config.use)
        notes.note(asked=request, members=known)
    return known


def _possible(runner: Runner, jobs: Sequence[Job]) -> tuple[list[Job], dict[str, str]]:
    """Return the jobs that can run, and the reasons why other rows cannot, by row key."""
    refused = {}
    for job in jobs:
        if job.row.key not in refused and (reason := runner.refusal(job)) is not None:
            refused[job.row.key] = reason
    return [job for job in jobs if job.row.key not in refused], refused


def _report_absent(parts: Sequence[Part], refused: dict[str, str]) -> None:
    absent = {
        row.name: refused[row.key] for part in parts for row in part.rows if row.key in refused
    }
    for part in parts:
        absent |= part.absent
    for name, reason in absent.items():
        typer.echo(f"{name} is left out: {one_line(reason)}", err=True)


def _about(arguments: Arguments, members: Sequence[str]) -> dict[str, Any]:
    return {
        "suite": arguments.name,
        "command": shlex.join(["python", "-m", "benchmarks.paper", *sys.argv[1:]]),
        "models": arguments.models,
        "members": tuple(members),
        "max_requests": arguments.suite.max_requests,
        "absent": arguments.absent,
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
