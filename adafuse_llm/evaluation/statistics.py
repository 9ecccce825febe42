"""Intervals and paired tests over recorded answers: seeded, so that they can be printed again.

`interval` is the percentile bootstrap over questions. `compare` sets two systems side by side on
the same questions: the difference with a paired bootstrap interval, and a two-sided p-value, of
McNemar's exact test where every answer is right or wrong, otherwise of approximate randomisation
(the two answers to a question change places at random).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from adafuse_llm.errors import InvalidInputError
from adafuse_llm.evaluation.metrics import Metric, Statistics

__all__ = ["Comparison", "Score", "compare", "holm", "interval", "mcnemar"]

LEVEL = 0.95
SIGNIFICANT = 0.05
"""A difference is shown where the p-value is below."""

SAMPLES = 2000
SEED = 1

Table = NDArray[np.float64]


class Score(BaseModel):
    """A score with its interval, in percent.

    Attributes:
        value: the score of all answers.
        low, high: bounds of the 95 % bootstrap interval.
    """

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float

    def shown(self, sign: str = "") -> str:
        """As in ``81.7 [78.0, 85.1]``; with sign ``+``, as a difference."""
        return f"{self.value:{sign}.1f} [{self.low:{sign}.1f}, {self.high:{sign}.1f}]"


class Comparison(BaseModel):
    """Two systems on the same questions. Scores in percent, the difference in points.

    Attributes:
        metric: what is compared.
        questions: how many both have answered.
        ours, theirs: the scores.
        difference: ours less theirs, with the bounds of its 95 % paired bootstrap interval.
        p_value: two-sided: how often a difference this large would come about if the systems were
            equally good.
        test: what gave the p-value.
    """

    model_config = ConfigDict(frozen=True)

    metric: str
    questions: int
    ours: float
    theirs: float
    difference: Score
    p_value: float
    test: str

    @property
    def verdict(self) -> Literal["above", "not shown", "below"]:
        """What is shown of ours, at p < `SIGNIFICANT`."""
        if self.p_value >= SIGNIFICANT:
            return "not shown"
        return "above" if self.difference.value > 0 else "below"

    @property
    def chance(self) -> str:
        """The p-value, as in ``p = 0.012``."""
        shown = p_value(self.p_value)
        return f"p {shown}" if shown.startswith("<") else f"p = {shown}"


def p_value(value: float) -> str:
    """Three digits, or that it is smaller."""
    return f"{value:.3f}" if value >= 0.0005 else "< 0.001"


def interval(
    metric: Metric, answers: Sequence[Statistics], *, samples: int = SAMPLES, seed: int = SEED
) -> Score:
    """The score of answers, with an interval.

    Args:
        metric: what scores them.
        answers: statistics of every answer, at least one.
        samples: how often questions are drawn anew, with replacement.
        seed: of the draws.
    """
    table = _table(answers)
    drawn = [metric.score(sums) for sums in _resampled(table, samples, seed)]
    return _with_bounds(metric.score(table.sum(axis=0)), drawn)


def compare(
    metric: Metric,
    ours: Sequence[Statistics],
    theirs: Sequence[Statistics],
    *,
    samples: int = SAMPLES,
    seed: int = SEED,
) -> Comparison:
    """Two systems on the same questions.

    Args:
        metric: what scores them.
        ours: statistics of one system's answers.
        theirs: those of the other's, in the same order.
        samples: draws of the bootstrap, and of the randomisation.
        seed: of the draws.

    Raises:
        InvalidInputError: they are not as many, or none.
    """
    if len(ours) != len(theirs):
        raise InvalidInputError(
            f"a paired test needs two answers to every question; got {len(ours)} and {len(theirs)}"
        )
    left, right = _table(ours), _table(theirs)
    width = left.shape[1]
    values = metric.score(left.sum(axis=0)), metric.score(right.sum(axis=0))
    drawn = [
        metric.score(sums[:width]) - metric.score(sums[width:])
        for sums in _resampled(np.hstack([left, right]), samples, seed)
    ]
    if metric.binary:
        p_value, test = mcnemar(left[:, 0] > 0, right[:, 0] > 0), "McNemar's exact test"
    else:
        p_value, test = _randomised(metric, left, right, samples, seed), "approximate randomisation"
    return Comparison(
        metric=metric.name,
        questions=len(left),
        ours=values[0],
        theirs=values[1],
        difference=_with_bounds(values[0] - values[1], drawn),
        p_value=p_value,
        test=test,
    )


def mcnemar(
    ours: Sequence[bool] | NDArray[np.bool_], theirs: Sequence[bool] | NDArray[np.bool_]
) -> float:
    """Two-sided p-value of McNemar's exact test: of the questions that only one system answers
    right, each is as likely to be either's (binomial, doubled, 1 at most).
    """
    pairs = list(zip(ours, theirs, strict=True))
    only_ours = sum(1 for left, right in pairs if left and not right)
    only_theirs = sum(1 for left, right in pairs if right and not left)
    total = only_ours + only_theirs
    tail = sum(math.comb(total, each) for each in range(min(only_ours, only_theirs) + 1))
    return float(min(1.0, 2 * tail / 2**total))


def _randomised(metric: Metric, left: Table, right: Table, samples: int, seed: int) -> float:
    """How often a difference at least as large comes about when every pair changes places with
    probability one half; the difference that was seen counts as one of the draws.
    """
    both = left.sum(axis=0) + right.sum(axis=0)
    seen = abs(metric.score(left.sum(axis=0)) - metric.score(right.sum(axis=0)))
    rng = np.random.default_rng(seed)
    moved = right - left
    as_large = 0
    for _ in range(samples):
        sums = left.sum(axis=0) + moved[rng.random(len(left)) < 0.5].sum(axis=0)
        difference = abs(metric.score(sums) - metric.score(both - sums))
        as_large += difference >= seen - 1e-9
    return (as_large + 1) / (samples + 1)


def _resampled(table: Table, samples: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """Sums of the rows of as many draws with replacement."""
    rng = np.random.default_rng(seed)
    rows = len(table)
    for _ in range(samples):
        yield np.bincount(rng.integers(rows, size=rows), minlength=rows) @ table


def _table(answers: Sequence[Statistics]) -> Table:
    if not answers:
        raise InvalidInputError("there are no answers to score")
    return np.array(answers, dtype=np.float64)


def _with_bounds(value: float, drawn: Sequence[float]) -> Score:
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Score(value=value, low=float(low), high=float(high))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted by Holm's method: the chance that any of those found
    below a level is there by chance is at most that level.
    """
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, p_values[at] * (len(order) - rank)))
        adjusted[at] = highest
    return adjusted
