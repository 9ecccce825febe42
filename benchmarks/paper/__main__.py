"""The command that makes the paper's tables. Run it in a clone of the repository.

python -m benchmarks.paper
python -m benchmarks.paper --suite long
python -m benchmarks.paper --data BENCHMARKS --model ONE --model TWO --output results/mine
python -m benchmarks.paper --suite benchmarks/paper/paper_8b.yaml --data BENCHMARKS

It answers questions with single members, other strategies and AdaFuse, and tests whether AdaFuse
scores higher. The output folder holds every answer, suite.json and suite.md. Run the same command
again to resume after an interruption.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from adafuse_llm import (
    AdaFuseEngine,
    AdaFuseError,
    InvalidInputError,
    RuntimeConfig,
    TransformersMember,
)
from adafuse_llm.cli.terminal import cancel_on_interrupt, one_line, progress_bar
from adafuse_llm.embedded import member_paths
from benchmarks.paper.decode import Interrupted, Record, Runner, load_work
from benchmarks.paper.suites import SUITES, Sizes, Suite, load_suite, parts_of
from benchmarks.paper.tables import Report, make_table, markdown
from benchmarks.real.members import real_folders


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 if all questions are answered; 1 if some failed; 2 if nothing could be run; 130 if
        interrupted.
    """
    given = _parser().parse_args(arguments)
    try:
        return _run(given)
    except AdaFuseError as error:
        sys.stderr.write(f"error: {one_line(str(error))}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    add = parser.add_argument
    add("--suite", default="embedded", help=f"{', '.join(SUITES)}, or a YAML file")
    add("--output", type=Path, help="folder of the answers and tables (default: results/SUITE)")
    add("--data", type=Path, help="folder with TASK.jsonl and TASK.prompt.txt")
    add("--model", action="append", default=[], help="folder or hub id of a member; repeatable")
    add("--dtype", help="data type of the weights")
    add("--device-map", help="where accelerate places the weights")
    add("--task", action="append", default=[], help="run only this task; repeatable")
    add("--limit", type=int, help="largest number of questions of each task")
    add("--first", type=int, help="number of the first question of each task")
    add("--max-requests", type=int, help="number of concurrent questions")
    add("--chat", action="store_true", help="send prompts as messages")
    return parser


def _run(given: argparse.Namespace) -> int:
    suite = _changed(load_suite(given.suite), given)
    works, absent = load_work(suite, given.data)
    output = given.output or Path("results") / Path(given.suite).stem
    runtime = RuntimeConfig(max_requests=suite.max_requests)
    engine = AdaFuseEngine.from_pretrained(
        _members(suite), dtype=suite.dtype, device_map=suite.device_map, runtime=runtime
    )
    identity = {
        "models": list(suite.real or suite.models) or "embedded",
        "dtype": suite.dtype,
        "device_map": suite.device_map,
        "max_requests": suite.max_requests,
    }
    tables = []
    with engine, cancel_on_interrupt() as cancel, progress_bar() as progress:
        parts = parts_of(suite, engine.members)
        total = sum(
            work.size(part, suite) * len(part.rows) for part in parts for work in works.values()
        )
        shown = progress.add_task(given.suite, total=total)

        def show(record: Record) -> None:
            if record.error is not None:
                progress.console.print(f"line {record.line}: {one_line(record.error)}")

        runner = Runner(engine, output, identity, cancel=cancel, on_record=show)
        for row in {row.name: row for part in parts for row in part.rows}.values():
            if (reason := runner.refusal(row)) is not None:
                absent[row.name] = reason
        for part in parts:
            for work in works.values():
                size, answers = work.size(part, suite), {}
                for row in part.rows:
                    if row.name not in absent:
                        try:
                            timed = part.size == "time"
                            answers[row.name] = runner.records(row, work, size, timed=timed)
                        except Interrupted:
                            progress.console.print("interrupted: run it again to resume")
                            return 130
                    progress.advance(shown, size)
                tables.append(make_table(part, work, answers))
    report = Report(
        suite=given.suite,
        command=shlex.join(["python", "-m", "benchmarks.paper", *sys.argv[1:]]),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        version=version("adafuse-llm"),
        machine=_machine(),
        members=engine.members,
        absent=absent,
        tables=tuple(tables),
    )
    (output / "suite.json").write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (output / "suite.md").write_text(markdown(report), encoding="utf-8")
    sys.stdout.write(markdown(report))
    return int(any(line.failed for table in tables for line in table.lines))


def _changed(suite: Suite, given: argparse.Namespace) -> Suite:
    """Return the suite with the values of the command line."""
    values = {
        "models": tuple(given.model),
        "dtype": given.dtype,
        "device_map": given.device_map,
        "tasks": tuple(given.task),
        "max_requests": given.max_requests,
        "chat": given.chat,
    }
    if suite.real and given.model:
        raise InvalidInputError("--model is not allowed, because the suite names its members")
    suite = suite.model_copy(update={name: each for name, each in values.items() if each})
    if given.limit:
        sizes = suite.questions.model_dump().items()
        smaller = Sizes(**{name: min(given.limit, size) for name, size in sizes})
        suite = suite.model_copy(update={"questions": smaller})
    if given.first is None:
        return suite
    tasks = suite.tasks or (*suite.ranges, "embedded", "nq", "squad", "triviaqa")
    lengths = {name: last - first for name, (first, last) in suite.ranges.items()}
    ranges = {name: (given.first, given.first + lengths.get(name, 10**6)) for name in tasks}
    return suite.model_copy(update={"ranges": ranges})


def _members(suite: Suite) -> list[str] | list[TransformersMember]:
    """Return the members to load.

    Raises:
        InvalidInputError: a real member is not there.
    """
    if not suite.real:
        return list(suite.models or map(str, member_paths()))
    folders = real_folders()
    if missing := [name for name in suite.real if name not in folders]:
        raise InvalidInputError(f"real members are missing: {', '.join(missing)}. Run `make real`.")
    return [TransformersMember(str(folders[name]), name=name) for name in suite.real]


def _machine() -> str:
    import torch

    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {gpu}Python {platform.python_version()}, "
        f"torch {version('torch')}, transformers {version('transformers')}"
    )


if __name__ == "__main__":
    sys.exit(main())
