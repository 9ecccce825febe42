"""Intervals and paired tests over recorded answers. A seed makes the results reproducible.

If every answer is right or wrong, `adafuse_llm.evaluation.comparison` compares two systems with
McNemar's exact test. Otherwise this module draws random subsets of the questions. For a score that
is a mean, the p-value equals that of the test that swaps the two answers to each question at
random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adafuse_llm.errors import InvalidInputError
from adafuse_llm.evaluation.comparison import Comparison, Score, unseen
from adafuse_llm.evaluation.comparison import compare as compare_rights
from benchmarks.paper.metrics import Metric, Statistics

SAMPLES = 2000
"""Number of samples of the bootstrap."""

SUBSETS, AT_ONCE = 40_000, 1000
"""Number of random subsets of the paired test, and how many of them are drawn at the same time."""

SEED = 1


def interval(metric: Metric, answers: Sequence[Statistics]) -> Score:
    """Return the score of answers with its 95 % bootstrap interval.

    If all answers are right, or all are wrong, the bound is the exact one (Clopper and Pearson).

    Args:
        metric: the metric of the score.
        answers: statistics of every answer, at least one.
    """
    table = np.array(answers, dtype=np.float64)
    rng, rows = np.random.default_rng(SEED), len(answers)
    value = metric.score(table.sum(axis=0))
    drawn = [
        metric.score(np.bincount(rng.integers(rows, size=rows), minlength=rows) @ table)
        for _ in range(SAMPLES)
    ]
    low, high = map(float, np.percentile(drawn, [2.5, 97.5]))
    if low == high and value in (0.0, 100.0):
        low, high = (0.0, 100 * unseen(rows)) if value == 0 else (100 - 100 * unseen(rows), 100.0)
    return Score(value=value, low=low, high=high)


def compare(
    metric: Metric, ours: Sequence[Statistics], theirs: Sequence[Statistics], *, seed: int = SEED
) -> Comparison:
    """Compare two systems on the same questions.

    Args:
        metric: the metric of the scores.
        ours: statistics of one system's answers.
        theirs: statistics of the other system's answers, in the same order.
        seed: seed of the random draws. Answers that are right or wrong need none.

    Raises:
        InvalidInputError: the systems have different numbers of answers, or none.
    """
    if metric.binary:
        rights = ([each[0] > 0 for each in system] for system in (ours, theirs))
        return compare_rights(metric.name, *rights)
    if len(ours) != len(theirs) or not ours:
        raise InvalidInputError("a paired test needs an answer of both systems to every question")
    left, right = np.array(ours, dtype=np.float64), np.array(theirs, dtype=np.float64)
    values = metric.score(left.sum(axis=0)), metric.score(right.sum(axis=0))
    p_value, low, high = _random_subsets(metric, left, right, seed)
    if np.array_equal(left, right):
        low, high = -100 * unseen(len(left)), 100 * unseen(len(left))
    return Comparison(
        metric=metric.name,
        questions=len(left),
        ours=values[0],
        theirs=values[1],
        difference=Score(value=values[0] - values[1], low=low, high=high),
        p_value=p_value,
    )


def _random_subsets(
    metric: Metric, left: NDArray[np.float64], right: NDArray[np.float64], seed: int
) -> tuple[float, float, float]:
    """Return the p-value and the bounds of the interval from random subsets of the questions.

    An empty subset agrees with every difference. One empty subset is added to the drawn ones, so
    that the p-value is never 0.
    """
    rng = np.random.default_rng(seed)
    rows, width = left.shape
    differences: list[float] = []
    for _ in range(0, SUBSETS, AT_ONCE):
        octets = rng.integers(256, size=(AT_ONCE, math.ceil(rows / 8)), dtype=np.uint8)
        chosen = np.unpackbits(octets, axis=1, count=rows)
        sums = chosen[chosen.any(axis=1)].astype(np.float64) @ np.hstack((left, right))
        differences += [metric.score(each[:width]) - metric.score(each[width:]) for each in sums]
    found = np.sort(np.round(differences, 9))  # rounded, because equal scores may differ by 1e-14
    empty = SUBSETS + 1 - len(found)
    tail = empty + min(np.count_nonzero(found <= 0), np.count_nonzero(found >= 0))
    p_value = min(1.0, 2 * tail / (SUBSETS + 1))
    outside = math.ceil(0.025 * (SUBSETS + 1)) - empty
    if outside <= 0:
        return p_value, -100.0, 100.0
    return p_value, float(found[outside - 1]), float(found[-outside])


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
