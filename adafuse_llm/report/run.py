"""What many answers took and how they were decided: the results of ``adafuse run --rounds``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from pydantic import BaseModel, ConfigDict

from adafuse_llm.errors import InvalidInputError
from adafuse_llm.report.lines import read_json_lines
from adafuse_llm.report.looks import looks
from adafuse_llm.report.page import Shown, bars, count, environment, figures, style, whole
from adafuse_llm.results import Round, Usage
from adafuse_llm.summary import Summary


class Answer(BaseModel):
    """One line of results. Those that failed have an error and no rounds."""

    model_config = ConfigDict(extra="ignore")

    line: int
    question: str | None = None
    pred: str = ""
    label: Any = None
    finish_reason: str
    error: str | None = None
    rounds: tuple[Round, ...] = ()
    usage: Usage | None = None

    @property
    def expected(self) -> str:
        """The label as text; several accepted answers with a stroke between them."""
        if self.label is None:
            return ""
        return " / ".join(map(str, self.label if isinstance(self.label, list) else [self.label]))

    @property
    def seconds(self) -> float:
        """Wall-clock time of its rounds."""
        return sum(each.elapsed for each in self.rounds)


class Cost(BaseModel):
    """What a member's share of all answers took, counted."""

    forward_passes: int
    tokens_processed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class RunSummary(BaseModel):
    """Many answers in figures. JSON-safe.

    Attributes:
        answers: how many there are.
        failed: lines that have an error instead.
        finish_reasons: answers by the reason why they ended.
        decisions: all rounds of all answers.
        seconds_per_answer: mean, median and 90th percentile of the wall-clock time of the rounds.
        cost: by member.
    """

    answers: int
    failed: int
    finish_reasons: dict[str, int]
    decisions: Summary
    seconds_per_answer: dict[str, float]
    cost: dict[str, Cost]

    @classmethod
    def of(cls, lines: Iterable[Answer]) -> RunSummary:
        """Summarise answers of one ensemble."""
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
    """The lines that ``adafuse run --rounds`` wrote; a last one that was cut off is left out.

    Raises:
        InvalidInputError: the file is not one of results, or they have no rounds.
    """
    lines = read_json_lines(path, Answer, "adafuse run")
    if not any(line.rounds for line in lines):
        raise InvalidInputError(
            f"{path} holds no rounds: run again with --rounds, which adds them to every result"
        )
    return lines


def run_page(lines: list[Answer], *, title: str) -> str:
    """Many answers as one self-contained HTML page."""
    summary = RunSummary.of(lines)
    members = [Shown(look) for look in looks(list(summary.cost)).values()]
    body = (
        environment()
        .get_template("run.jinja")
        .render(
            css=style(),
            members=members,
            figures=figures(summary.decisions, members),
            endings=bars(summary.finish_reasons),
            told=" · ".join(
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
            answers=lines,
        )
    )
    return whole(title, body)
