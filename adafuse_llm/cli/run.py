"""`adafuse run`: a test set of questions, answered line by line into a file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from adafuse_llm import AdaFuseEngine, InvalidInputError
from adafuse_llm.cli.common import (
    FAILED,
    INTERRUPTED,
    Setup,
    cancel_on_interrupt,
    one_line,
    read_text,
    stderr_console,
)

DEFAULTS: dict[str, Any] = {"stop": (r"\nQuestion:",)}
"""A base model goes on with a question of its own after its answer."""

FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "readable": True}


@dataclass(frozen=True)
class Line:
    """A line of the test set: its number from 1, and what it says or why that is unusable."""

    number: int
    question: str | None = None
    label: Any = None
    problem: str | None = None


def run(
    setup: Setup,
    *,
    test_set: Annotated[
        Path, typer.Option(help='JSON lines with "question" and "answer".', **FILE)
    ],
    output: Annotated[Path, typer.Option(help="JSON lines of results.", dir_okay=False)],
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file that comes before every question: task, examples.", **FILE),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help=r"How a question is put, with {question}; \n is understood. Default: as the "
            r"examples in --prompts do it, else 'Question: {question}\nAnswer:'."
        ),
    ] = None,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="Add the rounds and the usage to every result.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again; what the output holds is lost.")
    ] = False,
) -> int:
    """Answer a test set, one result line per line; resumes where it was interrupted.

    The prompt is the text of --prompts, a blank line, and the question. A result holds line,
    question, pred (the answer without surrounding whitespace), label and finish_reason; that of
    a line which failed has finish_reason "error" and the error. Results are written as they
    come; the same command goes on after the last whole one, and OUTPUT.run.json beside them
    makes sure that it is the same.

    Exit codes: 0 all lines answered; 1 some failed; 2 nothing could be run; 130 interrupted.
    """
    header = read_text(prompts) if prompts is not None else ""
    form = question_form(header) if template is None else template.replace("\\n", "\n")
    if "{question}" not in form:
        raise InvalidInputError(f"--template must contain {{question}}; got {template!r}")
    before = f"{header.rstrip()}\n\n" if header.strip() else ""
    content = test_set.read_bytes()
    lines = read_lines(content)
    results = Results(output)
    if any(path is not None and results.is_at(path) for path in (test_set, prompts)):
        raise InvalidInputError(f"--output {output} is one of the files to read")
    identity = {
        "test set": hashlib.sha256(content).hexdigest(),
        "prompts": hashlib.sha256(before.encode()).hexdigest(),
        "template": form,
        "models": list(setup.models) or "embedded",
        "dtype": setup.dtype,
        "revision": setup.revision,
        "rounds": rounds,
        "strategy": setup.strategy,
        **setup.config.model_dump(mode="json"),
    }
    done = [] if overwrite else results.done(identity, [line.number for line in lines])
    failed = sum(record.get("finish_reason") == "error" for record in done)
    todo = lines[len(done) :]
    if done:
        typer.echo(f"resuming: {len(done)} of {len(lines)} lines are done", err=True)
    if todo:
        with setup.engine() as engine, cancel_on_interrupt() as cancel, _progress() as progress:
            results.keep(len(done), identity)
            task = progress.add_task("", total=len(lines), completed=len(done))
            for line in todo:
                prompt = before + form.replace("{question}", line.question or "")
                record = _answer(engine, line, prompt, rounds, cancel)
                if record is None:
                    progress.console.print("interrupted: the same command resumes")
                    return INTERRUPTED
                results.append(record)
                if problem := record.get("error"):
                    failed += 1
                    progress.console.print(f"line {line.number}: {problem}", soft_wrap=True)
                progress.advance(task)
    typer.echo(f"{len(lines)} lines: {len(lines) - failed} answered, {failed} failed", err=True)
    return FAILED if failed else 0


def question_form(header: str) -> str:
    """How the examples of a prompt put a question, read off the last of them."""
    examples = re.findall(r"^Question:.*?(?=^Question:|\Z)", header, re.MULTILINE | re.DOTALL)
    if not examples:
        return "Question: {question}\nAnswer:"
    example = examples[-1]
    space = "\n" if example.startswith("Question:\n") else " "
    cue = re.search(r"^(?:Answer:|Let's think step by step\.?)\n?", example, re.MULTILINE)
    return f"Question:{space}{{question}}\n{cue[0] if cue else 'Answer:'}"


def read_lines(content: bytes) -> list[Line]:
    """The lines of a test set, less blank ones.

    Raises:
        InvalidInputError: there is none.
    """
    raw = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
    lines = [_read_line(number, line) for number, line in raw if line.strip()]
    if not lines:
        raise InvalidInputError("the test set is empty: it needs lines with question and answer")
    return lines


def _read_line(number: int, raw: bytes) -> Line:
    try:
        item = json.loads(raw)
        json.dumps(item, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        return Line(number, problem=f"not JSON: {error}")
    if not isinstance(item, dict) or not isinstance(item.get("question"), str):
        return Line(number, problem='not an object with a text "question"')
    if not item["question"].strip():
        return Line(number, problem='its "question" is empty')
    if "answer" not in item:
        return Line(number, item["question"], problem='it has no "answer"')
    return Line(number, item["question"], item["answer"])


def _answer(
    engine: AdaFuseEngine, line: Line, prompt: str, rounds: bool, cancel: Event
) -> dict[str, Any] | None:
    """The result for a line; None if interrupted."""
    record: dict[str, Any] = {
        "line": line.number,
        "question": line.question,
        "pred": "",
        "label": line.label,
        "finish_reason": "error",
    }
    if line.problem is not None:
        return {**record, "error": one_line(line.problem)}
    try:
        generation = engine.generate(prompt, cancel=cancel)
    except Exception as error:  # whatever is wrong with one line must not stop the others
        return {**record, "error": one_line(f"{type(error).__name__}: {error}")}
    if generation.finish_reason == "cancelled":
        return None
    record |= {"pred": generation.text.strip(), "finish_reason": generation.finish_reason}
    if rounds:
        record |= generation.model_dump(mode="json", include={"rounds", "usage"})
    return record


class Results:
    """The output file and, beside it, a description of the run it belongs to.

    Only whole lines count: what follows the last newline was cut off, and is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity = path.with_name(f"{path.name}.run.json")

    def is_at(self, path: Path) -> bool:
        """Whether the output would overwrite `path`."""
        return self.path.exists() and self.path.samefile(path)

    def done(self, identity: dict[str, Any], numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The results that are there already; changes nothing.

        Args:
            identity: what must be the same for a run to be resumed.
            numbers: the line numbers that the run will write, in order.

        Raises:
            InvalidInputError: they are not those of this run.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content:
            return []
        self._check(identity)
        try:
            records = [json.loads(line) for line in content.split(b"\n")[:-1]]
            found = [record["line"] for record in records]
        except (ValueError, TypeError, KeyError) as error:
            raise self._refusal("holds lines that are no results") from error
        if found != list(numbers[: len(found)]):
            raise self._refusal("holds other lines than this run would have written")
        return records

    def keep(self, count: int, identity: dict[str, Any]) -> None:
        """Drop what follows the first `count` lines, and get ready to append."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(0)
            size = sum(len(file.readline()) for _ in range(count))
            file.truncate(size)
        if not count:
            self._identity.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        """Write a result; it is in the file when this returns."""
        with self.path.open("ab") as file:
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def _check(self, identity: dict[str, Any]) -> None:
        try:
            theirs = json.loads(self._identity.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._refusal(f"was not written by this command (no {self._identity})") from error
        ours = json.loads(json.dumps(identity))
        for key in {**ours, **theirs}:
            if theirs.get(key) != ours.get(key):
                values = f"{theirs.get(key)!r}, not {ours.get(key)!r}"
                what = f"another {key}" if key in ("test set", "prompts") else f"{key} {values}"
                raise self._refusal(f"belongs to a run with {what}")

    def _refusal(self, reason: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.path} {reason}. Pass --overwrite to start again, or another --output."
        )


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Lines per second, or seconds per line."""
        if not task.speed:
            return Text("")
        rate = f"{task.speed:.1f} lines/s" if task.speed >= 1 else f"{1 / task.speed:.1f} s/line"
        return Text(rate)


def _progress() -> Progress:
    """A bar on stderr, where that is a terminal."""
    console = stderr_console()
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=3600,  # seconds: a line may take minutes
        disable=not console.is_terminal,
    )
