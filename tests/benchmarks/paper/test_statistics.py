"""Intervals and tests of scores that are not right or wrong, compared with their definitions."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from benchmarks.paper.metrics import load_metric
from benchmarks.paper.statistics import compare, holm, interval

EXACT, F1 = load_metric("exact_match"), load_metric("f1")


def means(values):
    return [(float(value), 1.0) for value in values]


def test_an_interval_has_the_width_of_the_normal_approximation():
    score = interval(EXACT, means([True] * 300 + [False] * 100))
    half = 100 * 1.96 * math.sqrt(0.75 * 0.25 / 400)
    assert score.value == 75
    assert score.low == pytest.approx(75 - half, abs=0.6)
    assert score.high == pytest.approx(75 + half, abs=0.6)


@pytest.mark.parametrize("answers", [1, 5, 25])
def test_the_interval_of_only_right_answers_is_that_of_clopper_and_pearson(answers):
    right = interval(EXACT, means([True] * answers))
    assert (right.value, right.high) == (100, 100)
    assert (right.low / 100) ** answers == pytest.approx(0.025)
    assert interval(EXACT, means([False] * answers)).high == pytest.approx(100 - right.low)


def test_random_subsets_agree_with_all_possible_exchanges():
    rng = random.Random(3)
    ours = [rng.random() for _ in range(10)]
    theirs = [value - 0.3 + 0.5 * rng.random() for value in ours]
    seen = abs(sum(ours) - sum(theirs))
    sums = [
        abs(sum(sign * (a - b) for sign, a, b in zip(signs, ours, theirs, strict=True)))
        for signs in itertools.product((1, -1), repeat=10)
    ]
    exact = sum(value >= seen - 1e-12 for value in sums) / len(sums)
    found = compare(F1, means(ours), means(theirs))
    assert 0.02 < exact < 0.9
    assert found.p_value == pytest.approx(exact, abs=0.01)
    assert (found.difference.low > 0) == (found.p_value < 0.05)


def test_right_and_wrong_answers_are_compared_exactly():
    found = compare(EXACT, means([True] * 8 + [False] * 2), means([False] * 8 + [True] * 2))
    assert found.p_value == pytest.approx(2 * (1 + 10 + 45) / 1024)


def test_holms_method_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]) == [1.0, 1.0]
