"""Intervals and tests of scores that are not right or wrong, compared with their definitions."""

import itertools
import random

import pytest

from benchmarks.paper.metrics import load_metric
from benchmarks.paper.statistics import compare, holm, interval

EXACT, F1 = load_metric("exact_match"), load_metric("f1")


def means(values):
    return [(float(value), 1.0) for value in values]


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


def test_holms_method_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]) == [1.0, 1.0]
