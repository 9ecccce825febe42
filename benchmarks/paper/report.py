"""The report of a suite as plain data: rows of tables, tests, and words per round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, computed_field, model_validator

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.report.page import count
from adafuse_llm.report.styles import owner
from adafuse_llm.results import Round
from adafuse_llm.summary import Summary
from benchmarks.paper.layout import Kind, Part, Plain, Row, Size, Suite
from benchmarks.paper.long import ALL_TASKS, Answered, Long, long_answers, rounds_of
from benchmarks.paper.metrics import MeanMetric, Metric, Statistics
from benchmarks.paper.run import WARM_UP, Answers, Work, question_count
from benchmarks.paper.runner import Evaluation, Record, compared, lost
from benchmarks.paper.statistics import SIGNIFICANT, Comparison, Score, chance, compare, holm

Rival = Literal["best member", "best peer", "reference"]
Verdict = Literal["above", "not shown", "below", "failed"]


class Cell(Plain):
    """The results of a system on a task.

    Attributes:
        evaluation: scores, seconds and counts per answer.
        tokens: tokens per answer of all members together, as in `Evaluation.tokens`.
        decoding_tokens: tokens per answer, without the tokens of the prompt.
        versus: tests against the best member, the best peer, or the part's reference. A test is
            missing if an answer of either system is lost (`Record.is_lost`).
    """

    evaluation: Evaluation
    tokens: float
    decoding_tokens: float
    versus: dict[Rival, Comparison]

    @property
    def score(self) -> Score:
        """The score by the main metric."""
        return next(iter(self.evaluation.scores.values()))

    @property
    def failures(self) -> str:
        """Text after a score, such as `` (3 failed)``. Empty if no answer failed."""
        failed = self.evaluation.failed
        return f" ({failed} failed)" if failed else ""


class Line(Plain):
    """A row of a part, with one cell per task."""

    name: str
    key: str
    kind: Kind
    at: float | None
    series: str
    cells: dict[str, Cell]


class Section(Plain):
    """A part with its results. `absent` names the rows that are left out, with the reason."""

    name: str
    title: str
    about: str
    reference: str | None
    axis: str | None
    size: Size
    questions: dict[str, int]
    lines: tuple[Line, ...]
    absent: dict[str, str]

    @property
    def timed(self) -> bool:
        """Whether questions ran one at a time, to measure time."""
        return self.size == "time"

    def best(self, task: str, kind: Kind) -> Line | None:
        """Return the line of a kind with the highest score. With equal scores, the cheapest wins.

        Lines with lost answers do not count. Return None if no line is left.
        """
        lines = [
            line
            for line in self.lines
            if line.kind == kind and not line.cells[task].evaluation.lost
        ]
        if not lines:
            return None
        return max(lines, key=lambda it: (it.cells[task].score.value, -it.cells[task].tokens))


class Claim(Plain):
    """A comparison of an AdaFuse row with a rival on a task.

    Attributes:
        task: name of the task, or ``all tasks``.
        ours: name of the AdaFuse row.
        theirs: name of the rival.
        kind: kind of the rival.
        tokens: tokens per answer of AdaFuse and of the rival.
        lost: numbers of lost answers (`Record.is_lost`) of AdaFuse and of the rival. If there are
            any, the claim has no comparison.
        comparison: the paired test.
        adjusted: the p-value, adjusted by Holm's method over the rivals of this row and task.
    """

    task: str
    ours: str
    theirs: str
    kind: Kind
    tokens: tuple[float, float]
    lost: tuple[int, int] = (0, 0)
    comparison: Comparison | None
    adjusted: float | None

    @model_validator(mode="before")
    @classmethod
    def _without_verdict(cls, data: Any) -> Any:
        """Drop a stored verdict, because the p-values determine it."""
        if isinstance(data, Mapping):
            return {name: value for name, value in data.items() if name != "verdict"}
        return data

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """The result of the test at p < 0.05, where p is `adjusted`."""
        if self.comparison is None or self.adjusted is None:
            return "failed"
        if self.adjusted >= SIGNIFICANT:
            return "not shown"
        return "above" if self.comparison.difference.value > 0 else "below"


class Trace(Plain):
    """An answer round by round, as in the paper's Example 1.

    Each item of `rounds` has the text of a round and the name of its member, or "all".
    """

    task: str
    system: str
    question: str
    label: tuple[str, ...]
    rounds: tuple[tuple[str, str], ...]

    @property
    def bracketed(self) -> str:
        """The rounds in brackets, such as ``[Ada Brook]wren [did]heron``."""
        return " ".join(f"[{text.strip() or '(end)'}]{member}" for text, member in self.rounds)


class Report(Plain):
    """All results of a suite.

    Attributes:
        suite: name or file of the suite.
        command: the command that made the report.
        date: date of the last answer (ISO 8601).
        version: version of this package.
        machine: description of the machine.
        models: models of the command. Empty for the embedded members.
        members: names of the members.
        max_requests: number of concurrent questions, except in parts that measure time.
        seconds: wall-clock seconds of all decoding.
        processor_seconds: processor seconds of all decoding.
        tasks: the main metric of every task.
        first: number of the first question, by task.
        absent: tasks that are left out, with the reason.
        sections: tables and figures.
        claims: comparisons of AdaFuse with the best member and with every peer of the same table,
            by task. With several tasks whose metrics are means, also over the questions of all of
            them.
        words: by task and row, how many rounds committed each number of words.
        sure: by task and row, the percentage of proposed words at whose start the margin was at
            least τ.
        traces: one answer per task, round by round.
        long: analysis of the tasks whose answers have several sentences. None without such tasks.
    """

    suite: str
    command: str
    date: str
    version: str
    machine: str
    models: tuple[str, ...]
    members: tuple[str, ...]
    max_requests: int
    seconds: float
    processor_seconds: float
    tasks: dict[str, str]
    first: dict[str, int] = Field(default_factory=dict)
    absent: dict[str, str]
    sections: tuple[Section, ...]
    claims: tuple[Claim, ...]
    words: dict[str, dict[str, dict[int, int]]]
    sure: dict[str, dict[str, float]] = Field(default_factory=dict)
    traces: tuple[Trace, ...]
    long: Long | None = None

    @property
    def time(self) -> str:
        """Text with the wall-clock and processor time of decoding."""
        return f"{_minutes(self.seconds)}, {_minutes(self.processor_seconds)} of processor time"

    def section(self, name: str) -> Section | None:
        """Return the part with this name, or None."""
        return next((section for section in self.sections if section.name == name), None)

    @property
    def tables(self) -> list[Section]:
        """Table 1 of all members, and of each ensemble of the suite."""
        return [section for section in self.sections if section.size == "table"]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def make_report(
    suite: Suite,
    parts: Sequence[Part],
    works: Mapping[str, Work],
    answers: Answers,
    *,
    refused: Mapping[str, str],
    about: Mapping[str, Any],
) -> Report:
    """Make the report from recorded answers.

    Args:
        suite: the suite.
        parts: the parts of the suite.
        works: the tasks of the suite, by name.
        answers: records by job.
        refused: reasons why rows cannot be decoded, by row key.
        about: the fields of `Report` that this function does not compute.
    """
    sections = [
        _section(part, suite, works, answers, refused) for part in parts if part.rows or part.absent
    ]
    tables = [section for section in sections if section.size == "table"]
    ours = [line for table in tables for line in table.lines if line.kind == "adafuse"]
    answered = {task: _answered(tables, task, work, answers) for task, work in works.items()}
    thresholds = {
        row.key: AdaFuseConfig(**row.options).margin_threshold
        for part in parts
        for row in part.rows
        if row.kind == "adafuse" and row.key not in refused
    }
    return Report(
        **about,
        seconds=sum(record.seconds for records in answers.values() for record in records),
        tasks={name: work.metrics[0].name for name, work in works.items()},
        first={name: work.numbers[0] for name, work in works.items()},
        sections=tuple(sections),
        claims=tuple(claim for table in tables for claim in _claims(table, works, answers)),
        words={
            task: {
                line.name: Summary.of(
                    each for record in found.records[line.name] for each in rounds_of(record)
                ).words_per_round
                for line in ours
            }
            for task, found in answered.items()
            if ours
        },
        sure={
            task: {
                line.name: _sure(found.records[line.name], thresholds[line.key]) for line in ours
            }
            for task, found in answered.items()
            if ours
        },
        traces=tuple(
            _trace(task, line.name, found.records[line.name], about["members"])
            for task, found in answered.items()
            for line in ours[-1:]
        ),
        long=long_answers(answered, about["members"]),
    )


def _section(
    part: Part,
    suite: Suite,
    works: Mapping[str, Work],
    answers: Answers,
    refused: Mapping[str, str],
) -> Section:
    rows = [row for row in part.rows if row.key not in refused]
    absent = {row.name: refused[row.key] for row in part.rows if row.key in refused}
    counts = {task: question_count(part, suite, work) for task, work in works.items()}
    records = {
        (task, row.key): _read(answers, task, row, counts[task], timed=part.size == "time")
        for task in works
        for row in rows
    }
    cells = {
        (task, row.key): _cell(records[task, row.key], row, works[task])
        for task in works
        for row in rows
    }
    section = Section(
        name=part.name,
        title=part.title,
        about=part.about,
        reference=part.reference,
        axis=part.axis,
        size=part.size,
        questions=counts,
        lines=tuple(
            Line(
                name=row.name,
                key=row.key,
                kind=row.kind,
                at=row.at,
                series=row.series,
                cells={task: cells[task, row.key] for task in works},
            )
            for row in rows
        ),
        absent={**absent, **part.absent},
    )
    for task, work in works.items():
        for rival, other in _rivals(section, task).items():
            for line in section.lines:
                ours, theirs = records[task, line.key], records[task, other.key]
                if line.key != other.key and not lost((*ours, *theirs)):
                    comparison = compared(ours, theirs, work.metrics[:1])[0]
                    line.cells[task].versus[rival] = comparison
    return section


def _read(answers: Answers, task: str, row: Row, size: int, *, timed: bool) -> Sequence[Record]:
    records = answers[task, row.key, timed]
    return records[: size + WARM_UP][-size:] if timed else records[:size]


def _cell(records: Sequence[Record], row: Row, work: Work) -> Cell:
    used = [record.usage for record in records if record.usage is not None]
    prompts = [sum(each.prompt_tokens.values()) for each in used]
    evaluation = Evaluation.of(records, work.metrics, task=work.task.name, system=row.name)
    return Cell(
        evaluation=evaluation,
        tokens=evaluation.tokens,
        decoding_tokens=evaluation.tokens - (fmean(prompts) if prompts else 0.0),
        versus={},
    )


def _rivals(section: Section, task: str) -> dict[Rival, Line]:
    rivals: dict[Rival, Line] = {}
    if section.size == "table":
        kinds: dict[Rival, Kind] = {"best member": "member", "best peer": "peer"}
        for rival, kind in kinds.items():
            if best := section.best(task, kind):
                rivals[rival] = best
    for line in section.lines:
        if line.name == section.reference:
            rivals["reference"] = line
    return rivals


def _claims(section: Section, works: Mapping[str, Work], answers: Answers) -> Iterator[Claim]:
    """Yield the claims of each task. If all metrics are means, add those of all tasks together."""
    for task, work in works.items():
        yield from _claims_of(task, section, {task: work.metrics[0]}, answers)
    metrics = {task: work.metrics[0] for task, work in works.items()}
    if len(metrics) > 1 and all(isinstance(each, MeanMetric) for each in metrics.values()):
        yield from _claims_of(ALL_TASKS, section, metrics, answers)


def _claims_of(
    name: str, section: Section, metrics: Mapping[str, Metric], answers: Answers
) -> Iterator[Claim]:
    """Yield the claims of one task, or of several tasks together.

    Args:
        name: name of the task, or `ALL_TASKS`.
        section: Table 1.
        metrics: the main metric of every task. If there are several, all are means.
        answers: records by job.
    """
    pools = {line.name: _pool(section, line, metrics, answers) for line in section.lines}
    rivals = [line for line in section.lines if line.kind == "peer"]
    members = [
        line for line in section.lines if line.kind == "member" and not pools[line.name].lost
    ]
    if members:
        rivals.insert(0, max(members, key=lambda line: pools[line.name].rank))
    metric = _metric_of(list(metrics.values()))
    for line in section.lines:
        if line.kind != "adafuse":
            continue
        ours = pools[line.name]
        comparisons = {
            rival.name: compare(metric, ours.statistics, pools[rival.name].statistics)
            for rival in rivals
            if not ours.lost and not pools[rival.name].lost
        }
        p_values = [comparison.p_value for comparison in comparisons.values()]
        adjusted = dict(zip(comparisons, holm(p_values), strict=True))
        for rival in rivals:
            theirs = pools[rival.name]
            yield Claim(
                task=name,
                ours=line.name,
                theirs=rival.name,
                kind=rival.kind,
                tokens=(ours.tokens, theirs.tokens),
                lost=(ours.lost, theirs.lost),
                comparison=comparisons.get(rival.name),
                adjusted=adjusted.get(rival.name),
            )


@dataclass(frozen=True)
class _Pool:
    """The answers of a system to the questions of one task or of several.

    Attributes:
        statistics: the statistics of every answer.
        score: mean score in percent, weighted by the number of questions.
        tokens: mean tokens per answer.
        lost: number of lost answers.
    """

    statistics: Sequence[Statistics]
    score: float
    tokens: float
    lost: int

    @property
    def rank(self) -> tuple[float, float]:
        """Key that sorts systems: by score, and by fewer tokens if the scores are equal."""
        return self.score, -self.tokens


def _pool(section: Section, line: Line, metrics: Mapping[str, Metric], answers: Answers) -> _Pool:
    records = {task: answers[task, line.key, False][: section.questions[task]] for task in metrics}
    cells = [line.cells[task] for task in metrics]
    sizes = [len(each) for each in records.values()]
    return _Pool(
        [each.statistics(metrics[task]) for task in metrics for each in records[task]],
        fmean([cell.score.value for cell in cells], sizes),
        fmean([cell.tokens for cell in cells], sizes),
        sum(lost(each) for each in records.values()),
    )


def _metric_of(metrics: Sequence[Metric]) -> Metric:
    """Return the only metric, or one that is the mean over the answers of several mean metrics."""
    first = metrics[0]
    if len(metrics) == 1 or not isinstance(first, MeanMetric):
        return first
    return replace(first, name="score", binary=all(each.binary for each in metrics))


def _answered(tables: Sequence[Section], task: str, work: Work, answers: Answers) -> Answered:
    """Return the answers to the questions of tables, by system."""
    return Answered(
        metric=work.metrics[0].name,
        stop=work.options.get("stop", ()),
        records={
            line.name: answers[task, line.key, False][: table.questions[task]]
            for table in tables
            for line in table.lines
        },
    )


def _sure(records: Sequence[Record], threshold: float) -> float:
    """Return the percentage of proposed words that began with a margin of at least this value."""
    margins = [
        margin
        for record in records
        for each in rounds_of(record)
        for values in each.margins.values()
        for margin in values
    ]
    return 100 * fmean(margin >= threshold for margin in margins) if margins else 0.0


def _trace(task: str, system: str, records: Sequence[Record], members: Sequence[str]) -> Trace:
    """Choose the answer to show round by round.

    A right answer is preferred to a wrong one. Then the number of members that won a round decides,
    then the number of rounds. If several answers are equal, the first one is chosen.
    """

    def rank(record: Record) -> tuple[bool, int, int]:
        rounds = rounds_of(record)
        owners = {owner(each, members) for each in rounds} - {None}
        return next(iter(record.metrics.values())) == 100, len(owners), len(rounds)

    chosen = max(records, key=rank)
    return Trace(
        task=task,
        system=system,
        question=chosen.question,
        label=chosen.label,
        rounds=tuple(_with_owners(rounds_of(chosen), members)),
    )


def _with_owners(rounds: Sequence[Round], members: Sequence[str]) -> list[tuple[str, str]]:
    return [(each.text, owner(each, members) or "all") for each in rounds]


def verdicts(report: Report) -> list[str]:
    """Return the results of the claims: a sentence per AdaFuse row, kind of rival and task.

    P-values are adjusted by Holm's method.
    """
    sentences = []
    for task, ours in dict.fromkeys((claim.task, claim.ours) for claim in report.claims):
        where = f", {task}" if len(report.tasks) > 1 else ""
        for kind, rivals in (("member", "the best member"), ("peer", "its peers")):
            own = [
                claim
                for claim in report.claims
                if (claim.task, claim.ours, claim.kind) == (task, ours, kind)
            ]
            results = [
                f"{words} {', '.join(_described(each) for each in own if _outcome(each) == words)}"
                for words in OUTCOMES
                if any(_outcome(each) == words for each in own)
            ]
            if results:
                sentences.append(f"{ours} and {rivals}{where}: {'; '.join(results)}.")
    return sentences


ABOVE, DEARER, UNSHOWN, BELOW, UNTESTED = OUTCOMES = (
    "above, with no more tokens than",
    "above, with more tokens than",
    "not shown to differ from",
    "below",
    "not compared with",
)
"""Texts of the possible results of a claim, at p < 0.05 after Holm's adjustment."""


def _outcome(claim: Claim) -> str:
    if claim.verdict == "above":
        return ABOVE if claim.tokens[0] <= claim.tokens[1] else DEARER
    return {"below": BELOW, "not shown": UNSHOWN, "failed": UNTESTED}[claim.verdict]


def _described(claim: Claim) -> str:
    comparison, adjusted = claim.comparison, claim.adjusted
    if comparison is None or adjusted is None:
        return f"{claim.theirs} ({count(sum(claim.lost), 'answer')} failed)"
    ours, theirs = claim.tokens
    share = 100 * (ours / theirs - 1) if theirs else 0.0
    return (
        f"{claim.theirs} ({comparison.difference.value:+.1f} points, Holm's {chance(adjusted)}, "
        f"{share:+.1f} % tokens)"
    )
