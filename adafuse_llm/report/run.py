"""Summary of answers with rounds: how many are right, their cost and their decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from adafuse_llm.errors import InvalidInputError
from adafuse_llm.report.json_lines import read_json_lines
from adafuse_llm.report.page import Shown, bars, count, environment, figures, style, whole
from adafuse_llm.report.styles import looks
from adafuse_llm.results import Round, Usage
from adafuse_llm.summary import Summary


class Answer(BaseModel):
    """One line of results. The line of a failed question has an error and no rounds.

    Results of ``adafuse eval`` also have the `answer` that the task read from the response, and the
    `metrics` of the answer.
    """

    model_config = ConfigDict(extra="ignore")

    line: int
    question: str | None = None
    pred: str = ""
    answer: str | None = None
    metrics: dict[str, float] = {}
    label: Any = None
    finish_reason: str
    error: str | None = None
    rounds: tuple[Round, ...] = ()
    usage: Usage | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Answer:
        for each in self.rounds:
            if not 0 <= each.winner < len(each.candidates):
                raise ValueError(
                    f"round {each.index} has {count(len(each.candidates), 'candidate')}, so its "
                    f"winner cannot be number {each.winner} (numbers start at 0)"
                )
        if len({frozenset(by_member) for _, by_member in self.usage or ()}) > 1:
            raise ValueError("the fields of usage name different members")
        return self

    @property
    def accepted(self) -> tuple[str, ...]:
        """The accepted answers; empty if the line has no label."""
        if self.label is None:
            return ()
        return tuple(map(str, self.label if isinstance(self.label, list) else [self.label]))

    @property
    def expected(self) -> str:
        """The label as text. Several accepted answers are separated by slashes."""
        return " / ".join(self.accepted)

    @property
    def seconds(self) -> float:
        """The wall-clock seconds of all rounds together."""
        return sum(each.elapsed for each in self.rounds)


@dataclass(frozen=True)
class Marks:
    """Which answers are right.

    Attributes:
        metric: name of the metric that decides whether an answer is right.
        right: whether the answer of a line is right, by line number. Lines without a label are
            absent.
    """

    metric: str
    right: Mapping[int, bool]


class Accuracy(BaseModel):
    """How many of the lines with a label have a right answer. Failed lines count as wrong.

    Attributes:
        metric: name of the metric that decides whether an answer is right.
        labeled: number of lines with a label.
        right: number of right answers among them.
    """

    metric: str
    labeled: int
    right: int

    def __str__(self) -> str:
        return f"{self.right / self.labeled:.1%} ({self.right} of {self.labeled}, {self.metric})"


class Cost(BaseModel):
    """The cost of one member over all answers."""

    forward_passes: int
    tokens_processed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class RunSummary(BaseModel):
    """Statistics of many answers. They can be written as JSON.

    Attributes:
        answers: number of answers.
        failed: number of lines with an error instead of an answer.
        accuracy: how many answers are right; None if this is not known.
        finish_reasons: number of answers by finish reason.
        decisions: summary of the rounds of all answers.
        seconds_per_answer: mean, median and 90th percentile of the rounds' wall-clock seconds.
        cost: cost by member.
    """

    answers: int
    failed: int
    accuracy: Accuracy | None = None
    finish_reasons: dict[str, int]
    decisions: Summary
    seconds_per_answer: dict[str, float]
    cost: dict[str, Cost]

    @classmethod
    def of(cls, lines: Iterable[Answer], marks: Marks | None = None) -> RunSummary:
        """Summarize answers of one ensemble.

        Args:
            lines: the answers.
            marks: which answers are right; None if this is not known.
        """
        lines = list(lines)
        answers = [line for line in lines if line.error is None]
        cost: dict[str, Counter[str]] = {}
        for answer in answers:
            for field, by_member in answer.usage or ():
                for name, value in by_member.items():
                    cost.setdefault(name, Counter())[field] += value
        seconds = [answer.seconds for answer in answers]
        return cls(
            answers=len(answers),
            failed=len(lines) - len(answers),
            accuracy=None
            if marks is None
            else Accuracy(
                metric=marks.metric, labeled=len(marks.right), right=sum(marks.right.values())
            ),
            finish_reasons=Counter(answer.finish_reason for answer in answers),
            decisions=Summary.of(each for answer in answers for each in answer.rounds),
            seconds_per_answer={
                "mean": fmean(seconds),
                "median": median(seconds),
                "p90": quantiles(seconds, n=10)[-1] if len(seconds) > 1 else seconds[0],
            },
            cost={name: Cost(**counts) for name, counts in cost.items()},
        )


def read_results(path: Path) -> list[Answer]:
    """Read the results of ``adafuse run --rounds``. An incomplete last line is ignored.

    Raises:
        InvalidInputError: the file has other contents, inconsistent results or no answers, or the
            answers have no rounds.
    """
    lines = read_json_lines(path, Answer, "adafuse run")
    answers = [line for line in lines if line.error is None]
    if not answers:
        raise InvalidInputError(f"{path} contains no answers: every line failed")
    if not any(answer.rounds for answer in answers):
        raise InvalidInputError(
            f"{path} contains no rounds: run again with --rounds, which adds them to every result"
        )
    return lines


def run_page(lines: list[Answer], *, title: str, marks: Marks | None = None) -> str:
    """Return many answers as one self-contained HTML page.

    Args:
        lines: the answers.
        title: heading of the page.
        marks: which answers are right; None if this is not known.
    """
    summary = RunSummary.of(lines, marks)
    members = [Shown(look) for look in looks(list(summary.cost)).values()]
    body = (
        environment()
        .get_template("run.jinja")
        .render(
            css=style(),
            members=members,
            figures=figures(summary.decisions, members),
            endings=bars(summary.finish_reasons),
            summary=" · ".join(
                [
                    count(summary.answers, "answer"),
                    f"{summary.failed} failed",
                    count(summary.decisions.rounds, "round"),
                    f"{summary.decisions.seconds:.1f} s",
                ]
            ),
            latency=summary.seconds_per_answer,
            usage=[
                {
                    "look": member,
                    "numbers": [
                        cost.forward_passes,
                        cost.tokens_processed,
                        cost.prompt_tokens,
                        cost.cached_tokens,
                        cost.completion_tokens,
                    ],
                }
                for member in members
                for cost in [summary.cost[member.name]]
            ],
            accuracy=summary.accuracy,
            right={} if marks is None else marks.right,
            answers=lines,
        )
    )
    return whole(title, body)
