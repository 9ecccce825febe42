"""Intervals and paired tests over recorded answers. A seed makes the results reproducible.

`interval` is a percentile bootstrap over questions. `compare` compares two systems on the same
questions. It returns the difference of their scores with a paired bootstrap interval, and a
two-sided p-value. The p-value comes from McNemar's exact test if every answer is either right or
wrong. Otherwise it comes from approximate randomization, which swaps the two answers to a question
at random.
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
"""The significance level: a difference is significant if its p-value is below this."""

SAMPLES = 2000
SEED = 1

Table = NDArray[np.float64]


class Score(BaseModel):
    """A score with its interval, in percent.

    Attributes:
        value: the score of all answers.
        low, high: bounds of the 95 % bootstrap interval of the score.
    """

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float

    def shown(self, sign: str = "") -> str:
        """Format the score like ``81.7 [78.0, 85.1]``. Use sign ``+`` for a difference."""
        return f"{self.value:{sign}.1f} [{self.low:{sign}.1f}, {self.high:{sign}.1f}]"


class Comparison(BaseModel):
    """A comparison of two systems on the same questions.

    Scores are in percent, and their difference is in percentage points.

    Attributes:
        metric: name of the metric.
        questions: number of questions that both systems answered.
        ours, theirs: the scores of the two systems.
        difference: ours minus theirs, with its 95 % paired bootstrap interval.
        p_value: two-sided p-value, that is, the probability of a difference at least this large if
            both systems were equally good.
        test: name of the test that gave the p-value.
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
        """The result of the test: whether ``ours`` is above or below ``theirs`` at p < 0.05."""
        if self.p_value >= SIGNIFICANT:
            return "not shown"
        return "above" if self.difference.value > 0 else "below"

    @property
    def chance(self) -> str:
        """The p-value as text, such as ``p = 0.012``."""
        shown = p_value(self.p_value)
        return f"p {shown}" if shown.startswith("<") else f"p = {shown}"


def p_value(value: float) -> str:
    """Format a p-value with three decimals, or as ``< 0.001`` if it is smaller."""
    return f"{value:.3f}" if value >= 0.0005 else "< 0.001"


def interval(
    metric: Metric, answers: Sequence[Statistics], *, samples: int = SAMPLES, seed: int = SEED
) -> Score:
    """Return the score of answers with its bootstrap interval.

    Args:
        metric: the metric of the score.
        answers: statistics of every answer, at least one.
        samples: number of bootstrap samples of the questions, drawn with replacement.
        seed: seed of the random draws.
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
    """Compare two systems on the same questions.

    Args:
        metric: the metric of the scores.
        ours: statistics of one system's answers.
        theirs: statistics of the other system's answers, in the same order.
        samples: number of samples in the bootstrap, and in the randomization.
        seed: seed of the random draws.

    Raises:
        InvalidInputError: the systems have different numbers of answers, or none.
    """
    if len(ours) != len(theirs):
        raise InvalidInputError(
            "a paired test needs an answer of both systems to every question; they have "
            f"{len(ours)} and {len(theirs)} answers"
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
        p_value = _randomization(metric, left, right, samples, seed)
        test = "approximate randomization"
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
    """Return the two-sided p-value of McNemar's exact test.

    The test uses the questions that only one of the systems answers right. If the systems are
    equally good, the first one answers each of these right with probability one half, so its number
    of right answers has a binomial distribution. The p-value is twice the smaller tail of this
    distribution, but at most 1.
    """
    pairs = list(zip(ours, theirs, strict=True))
    only_ours = sum(1 for left, right in pairs if left and not right)
    only_theirs = sum(1 for left, right in pairs if right and not left)
    total = only_ours + only_theirs
    tail = sum(math.comb(total, each) for each in range(min(only_ours, only_theirs) + 1))
    return float(min(1.0, 2 * tail / 2**total))


def _randomization(metric: Metric, left: Table, right: Table, samples: int, seed: int) -> float:
    """Return the p-value of approximate randomization.

    Every sample swaps the two answers to each question with probability one half. The p-value is
    the share of samples whose difference is at least as large as the observed one. The observed
    difference itself counts as one sample.
    """
    both = left.sum(axis=0) + right.sum(axis=0)
    observed = abs(metric.score(left.sum(axis=0)) - metric.score(right.sum(axis=0)))
    rng = np.random.default_rng(seed)
    change = right - left
    as_large = 0
    for _ in range(samples):
        sums = left.sum(axis=0) + change[rng.random(len(left)) < 0.5].sum(axis=0)
        difference = abs(metric.score(sums) - metric.score(both - sums))
        as_large += difference >= observed - 1e-9
    return (as_large + 1) / (samples + 1)


def _resampled(table: Table, samples: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """Draw bootstrap samples of rows with replacement, and yield the sums of each sample."""
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
    """Adjust the p-values of several tests by Holm's method.

    If null hypotheses with an adjusted p-value below a level are rejected, the probability that any
    of the rejected ones is true is at most that level.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(order) - rank)))
        adjusted[index] = highest
    return adjusted
