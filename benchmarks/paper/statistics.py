"""Intervals and paired tests over recorded answers. A seed makes the results reproducible.

`interval` is a percentile bootstrap over questions. `compare` compares two systems on the same
questions. It returns the difference of their scores with an interval and a two-sided p-value. Both
come from one test, so they always agree: the interval excludes 0 if and only if p < 0.05.

The test is exact or sampled:

McNemar's exact test   if every answer is either right or wrong.
random subsets         otherwise. A random subset contains each question with probability one half.

The two are the same test. If both systems are equally good, the difference on a random subset of
the questions is as likely to be above as below the true difference (Hartigan, "Using Subsample
Values as Typical Values", 1969). The one-sided p-value of a difference is therefore the share of
the subsets with a difference at least as far to the other side. For a score that is a mean, this
share equals the p-value of the test that swaps the two answers to each question at random. If every
answer is right or wrong, that is McNemar's exact test, and the share is computed without sampling.
The interval contains all differences that the test does not reject.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from adafuse_llm.errors import InvalidInputError
from benchmarks.paper.metrics import Metric, Statistics

__all__ = ["Comparison", "Score", "compare", "holm", "interval", "mcnemar"]

LEVEL = 0.95
SIGNIFICANT = 0.05
"""The significance level: a difference is significant if its p-value is below this."""

Z_LEVEL, Z_POWER = 1.96, 0.84
"""Quantiles of the normal distribution: a two-sided test at 5 %, and a power of 80 %."""

SAMPLES = 2000
"""Number of samples of the bootstrap."""

SUBSETS, AT_ONCE = 40_000, 1000
"""Number of random subsets of the paired test, and how many of them are drawn at the same time."""

SEED = 1

Table = NDArray[np.float64]


class Score(BaseModel):
    """A score with its interval, in percent.

    Attributes:
        value: the score of all answers.
        low, high: bounds of the 95 % bootstrap interval of the score. If all answers are right, or
            all are wrong, the bound is the exact one (Clopper and Pearson).
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
        difference: ours minus theirs, with its 95 % interval: all differences that the test does
            not reject. With five questions or fewer, the test rejects nothing, and the interval is
            -100 to 100. If no answer differs, the bounds are the largest shares of different
            answers of which none may be seen.
        p_value: two-sided p-value, that is, the probability of a difference at least this large if
            both systems were equally good.
        test: name of the test that gave the p-value and the interval.
        needed: about how many questions would show a difference as large as this one, at p < 0.05
            in four of five attempts. None if there is no difference, or if the score of all
            answers is not the mean of their scores.
    """

    model_config = ConfigDict(frozen=True)

    metric: str
    questions: int
    ours: float
    theirs: float
    difference: Score
    p_value: float
    test: str
    needed: int | None = None

    @property
    def verdict(self) -> Literal["above", "not shown", "below"]:
        """The result of the test: whether ``ours`` is above or below ``theirs`` at p < 0.05."""
        if self.p_value >= SIGNIFICANT:
            return "not shown"
        return "above" if self.difference.value > 0 else "below"

    @property
    def chance(self) -> str:
        """The p-value as text, such as ``p = 0.012``."""
        return chance(self.p_value)


def chance(value: float) -> str:
    """Format a p-value as text, such as ``p = 0.012`` or ``p < 0.001``."""
    shown = p_value(value)
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
    score = _with_bounds(metric.score(table.sum(axis=0)), drawn)
    if score.low < score.high or score.value not in (0.0, 100.0):
        return score
    unseen = _percent(_unseen(len(table)))
    bounds = {"high": unseen} if score.value == 0.0 else {"low": 100.0 - unseen}
    return score.model_copy(update=bounds)


def compare(
    metric: Metric,
    ours: Sequence[Statistics],
    theirs: Sequence[Statistics],
    *,
    samples: int = SUBSETS,
    seed: int = SEED,
) -> Comparison:
    """Compare two systems on the same questions.

    Args:
        metric: the metric of the scores.
        ours: statistics of one system's answers.
        theirs: statistics of the other system's answers, in the same order.
        samples: number of random subsets. McNemar's exact test draws none.
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
    values = metric.score(left.sum(axis=0)), metric.score(right.sum(axis=0))
    if metric.binary:
        p_value, low, high = _mcnemar(left[:, 0] > 0, right[:, 0] > 0)
        test = "McNemar's exact test"
    else:
        p_value, low, high = _random_subsets(metric, left, right, samples, seed)
        test = "random subsets"
    if np.array_equal(left, right):
        high = _percent(_unseen(len(left)))
        low = -high
    return Comparison(
        metric=metric.name,
        questions=len(left),
        ours=values[0],
        theirs=values[1],
        difference=Score(value=values[0] - values[1], low=low, high=high),
        p_value=p_value,
        test=test,
        needed=_needed(metric, left, right, values[0] - values[1]),
    )


def _unseen(answers: int) -> float:
    """Return the largest share of which none is seen in `answers` answers in 2.5 % of all cases."""
    return float(1 - ((1 - LEVEL) / 2) ** (1 / answers))


def _needed(metric: Metric, left: Table, right: Table, difference: float) -> int | None:
    """Return the number of questions that `Comparison.needed` describes (normal approximation)."""
    each: NDArray[np.float64] = np.array(
        [metric.score(o) - metric.score(t) for o, t in zip(left, right, strict=True)]
    )
    if not difference or abs(each.mean() - difference) > 1e-6:
        return None
    return math.ceil(((Z_LEVEL + Z_POWER) * float(each.std()) / difference) ** 2)


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


def _mcnemar(ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Return the p-value of McNemar's exact test and the bounds of its interval, in percent."""
    p_value = mcnemar(ours, theirs)
    wins, losses = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    ties = len(ours) - wins - losses
    significant = p_value < SIGNIFICANT
    low = _lower_bound(wins, losses, ties, positive=significant and wins > losses)
    high = -_lower_bound(losses, wins, ties, positive=significant and losses > wins)
    return p_value, _percent(low), _percent(high)


def _percent(share: float) -> float:
    return round(100 * share, 9) + 0.0  # the sum turns -0.0 into 0.0


def _lower_bound(wins: int, losses: int, ties: int, *, positive: bool) -> float:
    """Return the smallest difference that McNemar's exact test does not reject.

    It is the smallest difference such that at least 2.5 % of all subsets of the questions have a
    mean difference of at most this value. The empty subset counts.

    Args:
        wins: number of questions with a difference of 1.
        losses: number of questions with a difference of -1.
        ties: number of questions with a difference of 0.
        positive: whether the bound is above 0.
    """
    probabilities = np.outer(_binomial(wins), _binomial(losses))
    won, lost = np.nonzero(probabilities > 1e-15)
    probabilities = probabilities[won, lost]
    tied_below = np.concatenate([[0.0], np.cumsum(_binomial(ties))])

    def share(difference: float) -> float:
        """Return the share of subsets with a mean difference of at most `difference`, not 0."""
        limit = (won * (1 - difference) - lost * (1 + difference)) / difference
        # a subset counts if it has at least (or, below 0, at most) this number of ties
        edge = np.ceil(limit) if difference > 0 else np.floor(limit) + 1
        below = tied_below[np.clip(edge, 0, ties + 1).astype(int)]
        return float((probabilities * (1 - below if difference > 0 else below)).sum())

    tail = (1 - LEVEL) / 2
    if share(-1.0) >= tail:
        return -1.0
    low, high = (0.0, 1.0) if positive else (-1.0, 0.0)
    for _ in range(40):
        middle = (low + high) / 2
        if share(middle) < tail:
            low = middle
        else:
            high = middle
    return high


def _binomial(count: int) -> NDArray[np.float64]:
    """Return the probability of each size of a random subset of `count` questions."""
    logs = np.array([math.lgamma(size + 1) for size in range(count + 1)])
    probabilities: NDArray[np.float64] = np.exp(logs[-1] - logs - logs[::-1] - count * math.log(2))
    return probabilities


def _random_subsets(
    metric: Metric, left: Table, right: Table, samples: int, seed: int
) -> tuple[float, float, float]:
    """Return the p-value and the bounds of the interval from random subsets of the questions.

    An empty subset agrees with every difference. One empty subset is added to the drawn ones, so
    that the p-value is never 0.
    """
    rng = np.random.default_rng(seed)
    rows, width = left.shape
    differences = []
    for start in range(0, samples, AT_ONCE):
        size = min(AT_ONCE, samples - start)
        octets = rng.integers(256, size=(size, math.ceil(rows / 8)), dtype=np.uint8)
        chosen = np.unpackbits(octets, axis=1, count=rows)
        sums = chosen[chosen.any(axis=1)].astype(np.float64) @ np.hstack((left, right))
        differences += [metric.score(each[:width]) - metric.score(each[width:]) for each in sums]
    found = np.sort(np.round(differences, 9))  # rounded, because equal scores may differ by 1e-14
    empty = samples + 1 - len(found)
    tail = empty + min(np.count_nonzero(found <= 0), np.count_nonzero(found >= 0))
    p_value = min(1.0, 2 * tail / (samples + 1))
    outside = math.ceil((1 - LEVEL) / 2 * (samples + 1)) - empty
    if outside <= 0:
        return p_value, -100.0, 100.0
    return p_value, float(found[outside - 1]), float(found[-outside])


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
