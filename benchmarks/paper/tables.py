"""The tables of a suite as plain data, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from adafuse_llm.evaluation.comparison import SIGNIFICANT, Comparison, Score
from benchmarks.paper.decode import Record, Work
from benchmarks.paper.metrics import Metric
from benchmarks.paper.statistics import compare, holm, interval
from benchmarks.paper.suites import Kind, Part, Row


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Line(_Plain):
    """The results of a system on a task.

    Attributes:
        name: name of the system.
        kind: kind of the system.
        scores: score by metric, the main one first.
        groups: score of the main metric by group, if the task has groups.
        seconds, tokens, passes, rounds: means per answer. Tokens and passes are sums over the
            members.
        decoding: tokens per answer without those of the prompt.
        failed: number of answers with an error; they count as wrong.
    """

    name: str
    kind: Kind
    scores: dict[str, Score]
    groups: dict[str, float]
    seconds: float
    tokens: float
    decoding: float
    passes: float
    rounds: float
    failed: int

    @property
    def score(self) -> Score:
        """The score by the main metric."""
        return next(iter(self.scores.values()))


class Test(_Plain):
    """A paired test of two systems.

    Attributes:
        ours, theirs: names of the systems.
        comparison: the comparison.
        adjusted: the p-value, adjusted by Holm's method over the rivals of a system in the table.
    """

    ours: str
    theirs: str
    comparison: Comparison
    adjusted: float

    @property
    def verdict(self) -> str:
        """The result of the test at p < 0.05, where p is `adjusted`."""
        if self.adjusted >= SIGNIFICANT:
            return "not shown"
        return "above" if self.comparison.difference.value > 0 else "below"


class Table(_Plain):
    """A part of a suite on one task.

    Attributes:
        part: name of the part.
        title: its heading.
        task: name of the task.
        questions: number of questions.
        lines: the systems.
        tests: the tests.
    """

    part: str
    title: str
    task: str
    questions: int
    lines: tuple[Line, ...]
    tests: tuple[Test, ...]


class Report(_Plain):
    """All results of a suite.

    Attributes:
        suite: name or file of the suite.
        command: the command that made the report.
        date: when it was made (ISO 8601).
        version: version of this package.
        machine: description of the machine.
        members: names of the members.
        absent: tasks and rows that are left out, with the reason.
        tables: the tables.
    """

    suite: str
    command: str
    date: str
    version: str
    machine: str
    members: tuple[str, ...]
    absent: dict[str, str]
    tables: tuple[Table, ...]


def make_table(part: Part, work: Work, answers: Mapping[str, Sequence[Record]]) -> Table:
    """Return the results of a part on a task.

    Args:
        part: the part.
        work: the task.
        answers: records by name of the row. A row without records is left out.
    """
    rows = [row for row in part.rows if row.name in answers]
    lines = {row.name: _line(row, answers[row.name], work.metrics) for row in rows}
    tests: list[Test] = []
    for ours, rivals in _pairs(part, lines).items():
        found = [
            compare(
                work.metrics[0],
                *(
                    [each.statistics(work.metrics[0]) for each in answers[name]]
                    for name in (ours, theirs)
                ),
            )
            for theirs in rivals
        ]
        adjusted = holm([each.p_value for each in found])
        tests += [
            Test(ours=ours, theirs=theirs, comparison=each, adjusted=p)
            for theirs, each, p in zip(rivals, found, adjusted, strict=True)
        ]
    return Table(
        part=part.name,
        title=part.title,
        task=work.task.name,
        questions=max(map(len, answers.values())),
        lines=tuple(lines.values()),
        tests=tuple(tests),
    )


def _pairs(part: Part, lines: Mapping[str, Line]) -> dict[str, list[str]]:
    """Return the systems that each system of a part is tested against.

    In Table 1, AdaFuse is tested against the best member and all peers. Of several best members,
    the cheapest counts.
    """
    if part.size == "time":
        return {}
    if part.reference is not None:
        others = [name for name in lines if name != part.reference]
        return {name: [part.reference] for name in others} if part.reference in lines else {}
    members = [line for line in lines.values() if line.kind == "member"]
    best = max(members, key=lambda line: (line.score.value, -line.tokens), default=None)
    rivals = [*([best.name] if best else []), *(e.name for e in lines.values() if e.kind == "peer")]
    return {line.name: rivals for line in lines.values() if line.kind == "adafuse" and rivals}


def _line(row: Row, records: Sequence[Record], metrics: Sequence[Metric]) -> Line:
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.group is not None:
            groups.setdefault(record.group, []).append(record)
    main = metrics[0]

    def mean(*names: str) -> float:
        """Return the mean of a field, or of the first one minus the second, over all answers."""
        values = [[getattr(record, name) for name in names] for record in records]
        return fmean([each[0] - sum(each[1:]) for each in values if None not in each] or [0.0])

    return Line(
        name=row.name,
        kind=row.kind,
        scores={
            each.name: interval(each, [r.statistics(each) for r in records]) for each in metrics
        },
        groups={
            name: main.score(
                [sum(c) for c in zip(*(r.statistics(main) for r in each), strict=True)]
            )
            for name, each in groups.items()
        },
        seconds=mean("seconds"),
        tokens=mean("tokens"),
        decoding=mean("tokens", "prompt_tokens"),
        passes=mean("passes"),
        rounds=mean("rounds"),
        failed=sum(record.error is not None for record in records),
    )


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    parts = [
        f"# {report.suite}",
        f"`{report.command}` on {report.date[:10]} with adafuse-llm {report.version} on a machine "
        f"with {report.machine}.",
        *(_markdown(table) for table in report.tables),
        *(f"Left out: {name}: {reason}." for name, reason in report.absent.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown(table: Table) -> str:
    """Return a table, the scores by group if the task has several, and the tests."""
    metrics = list(table.lines[0].scores) if table.lines else []
    parts = [
        f"## {table.title}: {table.task}",
        f"{table.questions} questions. Scores are in percent, with 95 % intervals. The other "
        "columns are means per answer, summed over the members: seconds, tokens (decoding: without "
        "those of the prompt), forward passes and rounds.",
        _grid(
            ["system", *metrics, "seconds", "tokens", "decoding", "passes", "rounds", "failed"],
            (
                [
                    line.name,
                    *(score.shown() for score in line.scores.values()),
                    f"{line.seconds:.3f}",
                    f"{line.tokens:.0f}",
                    f"{line.decoding:.1f}",
                    f"{line.passes:.1f}",
                    f"{line.rounds:.1f}",
                    str(line.failed),
                ]
                for line in table.lines
            ),
        ),
    ]
    names = list(table.lines[0].groups) if table.lines else []
    if len(names) > 1:
        rows = (
            [line.name, *(f"{line.groups.get(name, 0):.1f}" for name in names)]
            for line in table.lines
        )
        parts.append(_grid([metrics[0], *names], rows))
    if table.tests:
        parts.append(_grid(["system", "against", "points", "p", "p, Holm", "shown"], _tests(table)))
    return "\n\n".join(parts)


def _tests(table: Table) -> Iterator[list[str]]:
    for test in table.tests:
        found = test.comparison
        chance = found.chance.removeprefix("p ").removeprefix("= ")
        yield [
            test.ours,
            test.theirs,
            found.difference.shown("+"),
            chance,
            f"{test.adjusted:.3f}",
            test.verdict,
        ]


def _grid(heads: Sequence[str], rows: Iterator[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    lines += (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join(lines)
