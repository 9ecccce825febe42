"""A paired comparison of two systems that answered the same questions.

Every answer is right or wrong. The p-value is that of McNemar's exact test, and the interval
contains all differences that this test does not reject (but see `unseen`). So the interval excludes
0 if and only if p < 0.05.

To find the interval, think of random subsets that contain each question with probability one half.
The difference on such a subset is as likely to be above as below the true difference (Hartigan,
"Using Subsample Values as Typical Values", 1969). So the interval leaves out the lowest and the
highest 2.5 % of the differences on all these subsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from adafuse_llm.errors import InvalidInputError

__all__ = ["Comparison", "Score", "compare", "mcnemar", "share"]

SIGNIFICANT = 0.05
"""The significance level: a difference with a p-value below it is significant."""

Z_LEVEL, Z_POWER = 1.96, 0.84
"""Quantiles of the normal distribution for a two-sided test at 5 % with a power of 80 %."""


class Score(BaseModel):
    """A score or a difference with its 95 % interval.

    Attributes:
        value: the score in percent, or the difference in percentage points.
        low, high: bounds of the interval.
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

    Attributes:
        metric: name of the metric.
        questions: number of questions. Both systems answered all of them.
        ours, theirs: the scores of the two systems in percent.
        difference: ours minus theirs in percentage points, with its 95 % interval: all differences
            that the test does not reject. With five questions or fewer, the test rejects none. If
            both are right on the same questions, the bounds are those of `unseen` instead.
        p_value: two-sided p-value: the probability of a difference at least this large if both
            systems are equally good.
        needed: about how many questions would show a difference of this size at p < 0.05 in four of
            five attempts; None if there is no difference.
    """

    model_config = ConfigDict(frozen=True)

    metric: str
    questions: int
    ours: float
    theirs: float
    difference: Score
    p_value: float
    needed: int | None = None

    @property
    def verdict(self) -> Literal["above", "not shown", "below"]:
        """Whether the test shows, at p < 0.05, that ``ours`` is above or below ``theirs``."""
        if self.p_value >= SIGNIFICANT:
            return "not shown"
        return "above" if self.difference.value > 0 else "below"

    @property
    def chance(self) -> str:
        """The p-value as text, such as ``p = 0.012`` or ``p < 0.001``."""
        return f"p = {self.p_value:.3f}" if self.p_value >= 0.0005 else "p < 0.001"


def compare(metric: str, ours: Sequence[bool], theirs: Sequence[bool]) -> Comparison:
    """Compare two systems. Their answers to the same questions are right (True) or wrong.

    Raises:
        InvalidInputError: the systems have different numbers of answers, or none.
    """
    if len(ours) != len(theirs) or not ours:
        raise InvalidInputError(
            "a paired test needs an answer of both systems to every question; they have "
            f"{len(ours)} and {len(theirs)} answers"
        )
    total = len(ours)
    wins = sum(left and not right for left, right in zip(ours, theirs, strict=True))
    losses = sum(right and not left for left, right in zip(ours, theirs, strict=True))
    difference = (wins - losses) / total
    low, high = subset_bounds(wins, losses, total - wins - losses)
    needed = None
    if difference:
        variance = (wins + losses) / total - difference**2
        needed = math.ceil((Z_LEVEL + Z_POWER) ** 2 * variance / difference**2)
    return Comparison(
        metric=metric,
        questions=total,
        ours=100 * sum(ours) / total,
        theirs=100 * sum(theirs) / total,
        difference=Score(
            value=100 * difference, low=round(100 * low, 9), high=round(100 * high, 9)
        ),
        p_value=mcnemar(wins, losses),
        needed=needed,
    )


def mcnemar(wins: int, losses: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    Only our system answers `wins` questions right, and only theirs `losses`. The result is twice
    the probability of ``min(wins, losses)`` heads or fewer in ``wins + losses`` tosses, at most 1.
    """
    total = wins + losses
    tail = sum(math.comb(total, each) for each in range(min(wins, losses) + 1))
    return float(min(1.0, 2 * tail / 2**total))


def unseen(answers: int) -> float:
    """Return a 97.5 % upper bound on the rate of an event that none of `answers` answers showed."""
    return float(1 - 0.025 ** (1 / answers))


def share(hits: int, total: int, tail: float = 0.025) -> Score:
    """Return ``hits / total`` in percent with its exact interval (Clopper and Pearson).

    The true share is beyond each bound with a probability of at most `tail`.
    """
    low, high = _lowest_share(hits, total, tail), 1 - _lowest_share(total - hits, total, tail)
    return Score(value=100 * hits / total, low=100 * low, high=100 * high)


def _lowest_share(hits: int, total: int, tail: float) -> float:
    """Return the share at which the probability of `hits` or more of `total` is `tail`."""
    counts, ways = np.arange(hits, total + 1), _log_ways(total)[hits:]
    low, high = 0.0, 1.0 if hits else 0.0
    while high - low > 1e-9:
        p = (low + high) / 2
        seen = np.exp(ways + counts * math.log(p) + (total - counts) * math.log1p(-p)).sum()
        low, high = (low, p) if seen > tail else (p, high)
    return low


def _log_ways(total: int) -> NDArray[np.float64]:
    """Return the logarithms of the binomial coefficients of `total` over 0, 1, ..., [total + 1]."""
    factorials = np.append(0.0, np.cumsum(np.log(np.arange(1, total + 1))))
    ways: NDArray[np.float64] = factorials[-1] - factorials - factorials[::-1]
    return ways


def subset_bounds(wins: int, losses: int, ties: int) -> tuple[float, float]:
    """Return the bounds between which 95 % of the differences on random subsets lie.

    `wins`, `losses` and `ties` count the questions with a difference of 1, -1 and 0. Beyond
    each bound lie 2.5 %. The empty subset agrees with every difference, so it counts beyond both.
    """
    if not wins and not losses:
        return -unseen(ties), unseen(ties)
    empty = 0.5 ** (wins + losses + ties)
    if empty >= 0.025:
        return -1.0, 1.0
    won, lost = np.arange(wins + 1), np.arange(losses + 1)
    of_won, of_lost, of_tied = (
        np.exp(_log_ways(count) - count * math.log(2)) for count in (wins, losses, ties)
    )
    gained, size = np.subtract.outer(won, lost), np.add.outer(won, lost)
    weights = np.outer(of_won, of_lost)
    fewer = np.append(0.0, np.cumsum(of_tied))  # P(fewer ties than 0, 1, ...)

    def at_most(difference: float) -> float:
        """Return the probability that a subset is not empty and has at most this difference."""
        if not difference:
            return float(weights[gained <= 0].sum()) - empty
        ties_at_equality = gained / difference - size
        if difference > 0:  # at least so many ties
            least = np.clip(np.ceil(ties_at_equality).astype(int), 0, ties + 1)
            share_of_ties = fewer[-1] - fewer[least]
        else:  # at most so many ties
            share_of_ties = fewer[np.clip(np.floor(ties_at_equality).astype(int) + 1, 0, ties + 1)]
        return float((weights * share_of_ties).sum()) - empty

    def first(reaches: Callable[[float], bool]) -> float:
        low, high = -1.0, 1.0
        while high - low > 1e-14:
            middle = (low + high) / 2
            low, high = (low, middle) if reaches(at_most(middle)) else (middle, high)
        return round(high, 13)

    tail = 0.025 - empty
    most = at_most(1.0) - tail
    return first(lambda below: below >= tail), first(lambda below: below > most)
