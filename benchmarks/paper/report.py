"""A suite in figures: every table's rows, what the tests say, rounds in words. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.evaluation.runner import Evaluation, Record, compared, lost
from adafuse_llm.evaluation.statistics import Comparison, Score, holm
from adafuse_llm.report.looks import owner
from adafuse_llm.report.page import count
from adafuse_llm.results import Round
from adafuse_llm.summary import Summary
from benchmarks.paper.layout import Kind, Part, Row, Suite
from benchmarks.paper.run import WARM_UP, Answers, Work, asked

Rival = Literal["best member", "best peer", "reference"]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cell(_Plain):
    """A system on a task.

    Attributes:
        evaluation: scores, seconds and counts per answer.
        tokens: per answer, by all members together, as `runner.tokens` counts them.
        decoding_tokens: of these, those that are no prompt.
        versus: tests against the best member, the best peer, or the part's reference; none where
            answers of either were lost.
    """

    evaluation: Evaluation
    tokens: float
    decoding_tokens: float
    versus: dict[Rival, Comparison]

    @property
    def score(self) -> Score:
        """The main metric."""
        return next(iter(self.evaluation.scores.values()))

    @property
    def failures(self) -> str:
        """As in `` (3 failed)``, to stand after a score; empty if none failed."""
        failed = self.evaluation.failed
        return f" ({failed} failed)" if failed else ""


class Line(_Plain):
    """A row of a part, with a cell per task."""

    name: str
    key: str
    kind: Kind
    at: float | None
    series: str
    cells: dict[str, Cell]


class Section(_Plain):
    """A part, computed. `absent` are rows that are left out, with the reason."""

    name: str
    title: str
    about: str
    reference: str | None
    axis: str | None
    timed: bool
    questions: dict[str, int]
    lines: tuple[Line, ...]
    absent: dict[str, str]

    def best(self, task: str, kind: Kind) -> Line | None:
        """The line of a kind with the highest score; of equal ones the cheapest. A line with lost
        answers is none.
        """
        lines = [
            each
            for each in self.lines
            if each.kind == kind and not each.cells[task].evaluation.lost
        ]
        if not lines:
            return None
        return max(lines, key=lambda e: (e.cells[task].score.value, -e.cells[task].tokens))


class Claim(_Plain):
    """Whether a row of AdaFuse is above a rival on a task.

    Attributes:
        tokens: per answer, ours and theirs.
        lost: answers that failed of the run, ours and theirs; with one of these there is neither
            a comparison nor a verdict.
        adjusted: the p-value, by Holm's method over the rivals of this row and task.
        verdict: what is shown at p < 0.05, before adjustment.
    """

    task: str
    ours: str
    theirs: str
    kind: Kind
    tokens: tuple[float, float]
    lost: tuple[int, int] = (0, 0)
    comparison: Comparison | None
    adjusted: float | None
    verdict: Literal["above", "not shown", "below", "failed"]


class Trace(_Plain):
    """An answer round by round (the paper's Example 1): text, and who wrote it."""

    task: str
    system: str
    question: str
    label: tuple[str, ...]
    rounds: tuple[tuple[str, str], ...]

    @property
    def bracketed(self) -> str:
        """As in ``[Ada Brook]wren [did]heron``."""
        return " ".join(f"[{text.strip() or '(end)'}]{who}" for text, who in self.rounds)


class Report(_Plain):
    """Everything that a suite has found.

    Attributes:
        command: that made it.
        date: when it was finished (ISO 8601).
        version: of this package.
        machine: on what.
        models: as given; none for the embedded members.
        members: their names.
        max_requests: questions answered at the same time, where time is not measured.
        seconds: that decoding took, all of it, as the clock has it.
        processor_seconds: that it took of the processors, where it ran on them.
        tasks: the main metric of every task.
        absent: tasks that are left out, with the reason.
        sections: tables and figures.
        claims: is AdaFuse above the best member, and above every peer?
        words: rounds by the number of words they committed, by task and row.
        sure: percent of the words that members have begun with a margin of at least τ, by task and
            row.
        traces: one per task.
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
    absent: dict[str, str]
    sections: tuple[Section, ...]
    claims: tuple[Claim, ...]
    words: dict[str, dict[str, dict[int, int]]]
    sure: dict[str, dict[str, float]] = Field(default_factory=dict)
    traces: tuple[Trace, ...]

    @property
    def time(self) -> str:
        """How long decoding took, in words."""
        return f"{_minutes(self.seconds)}, {_minutes(self.processor_seconds)} of processor time"

    def section(self, name: str) -> Section | None:
        """A part by its name."""
        return next((each for each in self.sections if each.name == name), None)


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
    """The report of answers.

    Args:
        suite: what was asked for.
        parts: its parts.
        works: its tasks.
        answers: records by job.
        refused: rows that could not be decoded, by their key, with the reason.
        about: the fields of `Report` that are not computed here.
    """
    sections = [
        _section(part, suite, works, answers, refused) for part in parts if part.rows or part.absent
    ]
    first = next((each for each in sections if each.name == "table-1"), None)
    ours = [] if first is None else [each for each in first.lines if each.kind == "adafuse"]
    records = {(task, line.name): answers[task, line.key, False] for task in works for line in ours}
    sure_from = {
        row.key: AdaFuseConfig(**row.options).margin_threshold
        for part in parts
        for row in part.rows
        if row.kind == "adafuse" and row.key not in refused
    }
    return Report(
        **about,
        seconds=sum(record.seconds for each in answers.values() for record in each),
        tasks={name: work.metrics[0].name for name, work in works.items()},
        sections=tuple(sections),
        claims=()
        if first is None
        else tuple(
            claim
            for task in works
            for line in ours
            for claim in _claims(first, task, line, works[task], answers)
        ),
        words={
            task: {
                line.name: Summary.of(
                    each for record in records[task, line.name] for each in _rounds(record)
                ).words_per_round
                for line in ours
            }
            for task in works
            if ours
        },
        sure={
            task: {line.name: _sure(records[task, line.name], sure_from[line.key]) for line in ours}
            for task in works
            if ours
        },
        traces=tuple(
            _trace(task, line.name, records[task, line.name], about["members"])
            for task in works
            for line in ours[-1:]
        ),
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
    timed = part.size == "time"
    counts = {task: asked(part, suite, work) for task, work in works.items()}
    records = {
        (task, row.key): _read(answers, task, row, counts[task], timed=timed)
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
        timed=timed,
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
                    found = compared(ours, theirs, work.metrics[:1])[0]
                    line.cells[task].versus[rival] = found
    return section


def _read(answers: Answers, task: str, row: Row, size: int, *, timed: bool) -> Sequence[Record]:
    found = answers[task, row.key, timed]
    return found[: size + WARM_UP][-size:] if timed else found[:size]


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
    found: dict[Rival, Line] = {}
    if section.name == "table-1":
        kinds: dict[Rival, Kind] = {"best member": "member", "best peer": "peer"}
        for rival, kind in kinds.items():
            if best := section.best(task, kind):
                found[rival] = best
    for line in section.lines:
        if line.name == section.reference:
            found["reference"] = line
    return found


def _claims(section: Section, task: str, line: Line, work: Work, answers: Answers) -> list[Claim]:
    rivals = [each for each in section.lines if each.kind == "peer"]
    if best := section.best(task, "member"):
        rivals.insert(0, best)
    size = section.questions[task]
    ours = answers[task, line.key, False][:size]
    found: dict[str, Comparison] = {}
    failed = {}
    for rival in rivals:
        theirs = answers[task, rival.key, False][:size]
        failed[rival.key] = lost(ours), lost(theirs)
        if not any(failed[rival.key]):
            found[rival.key] = compared(ours, theirs, work.metrics[:1])[0]
    adjusted = dict(zip(found, holm([each.p_value for each in found.values()]), strict=True))
    return [
        Claim(
            task=task,
            ours=line.name,
            theirs=rival.name,
            kind=rival.kind,
            tokens=(line.cells[task].tokens, rival.cells[task].tokens),
            lost=failed[rival.key],
            comparison=found.get(rival.key),
            adjusted=adjusted.get(rival.key),
            verdict=found[rival.key].verdict if rival.key in found else "failed",
        )
        for rival in rivals
    ]


def _rounds(record: Record) -> tuple[Round, ...]:
    return TypeAdapter(tuple[Round, ...]).validate_python(record.rounds or ())


def _sure(records: Sequence[Record], threshold: float) -> float:
    """Percent of the words that members have considered which began with at least this margin."""
    margins = [
        margin
        for record in records
        for each in _rounds(record)
        for found in each.margins.values()
        for margin in found
    ]
    return 100 * fmean(margin >= threshold for margin in margins) if margins else 0.0


def _trace(task: str, system: str, records: Sequence[Record], members: Sequence[str]) -> Trace:
    """Of the right answers in which most members have won a round, the first of most rounds."""

    def worth(record: Record) -> tuple[bool, int, int]:
        rounds = _rounds(record)
        who = {owner(each, members) for each in rounds} - {None}
        return next(iter(record.metrics.values())) == 100, len(who), len(rounds)

    chosen = max(records, key=worth)
    return Trace(
        task=task,
        system=system,
        question=chosen.question,
        label=chosen.label,
        rounds=tuple(_told(_rounds(chosen), members)),
    )


def _told(rounds: Sequence[Round], members: Sequence[str]) -> list[tuple[str, str]]:
    return [(each.text, owner(each, members) or "all") for each in rounds]


def verdicts(report: Report) -> list[str]:
    """What the claims show, a sentence per row of AdaFuse, kind of rival and task."""
    sentences = []
    for task, ours in dict.fromkeys((claim.task, claim.ours) for claim in report.claims):
        where = f", {task}" if len(report.tasks) > 1 else ""
        for kind, whom in (("member", "the best member"), ("peer", "its peers")):
            own = [
                claim
                for claim in report.claims
                if (claim.task, claim.ours, claim.kind) == (task, ours, kind)
            ]
            told = [
                f"{words} {', '.join(_described(each) for each in own if _outcome(each) == words)}"
                for words in OUTCOMES
                if any(_outcome(each) == words for each in own)
            ]
            if told:
                sentences.append(f"{ours} and {whom}{where}: {'; '.join(told)}.")
    return sentences


ABOVE, DEARER, UNSHOWN, BELOW, UNTOLD = OUTCOMES = (
    "above, with no more tokens than",
    "above, with more tokens than",
    "no difference is shown from",
    "below",
    "nothing is said about",
)
"""What a claim may come to, in words, at p < 0.05 each."""


def _outcome(claim: Claim) -> str:
    if claim.verdict == "above":
        return ABOVE if claim.tokens[0] <= claim.tokens[1] else DEARER
    return {"below": BELOW, "not shown": UNSHOWN, "failed": UNTOLD}[claim.verdict]


def _described(claim: Claim) -> str:
    found = claim.comparison
    if found is None:
        return f"{claim.theirs} ({count(sum(claim.lost), 'answer')} failed)"
    ours, theirs = claim.tokens
    share = 100 * (ours / theirs - 1) if theirs else 0.0
    return (
        f"{claim.theirs} ({found.difference.value:+.1f} points, {found.chance}, "
        f"{share:+.1f} % tokens)"
    )
