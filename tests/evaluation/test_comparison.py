"""The paired test compared with manual arithmetic and its definition."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.evaluation.comparison import SIGNIFICANT, compare, mcnemar


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [(0, 0, 1), (5, 0, 2 / 32), (0, 5, 2 / 32), (3, 3, 1), (8, 2, 2 * (1 + 10 + 45) / 1024)],
)
def test_mcnemar_by_hand(wins, losses, p_value):
    assert mcnemar(wins, losses) == pytest.approx(p_value)


def test_systems_are_compared_question_by_question():
    ours = [True] * 60 + [False] * 40
    theirs = [True] * 50 + [False] * 50
    found = compare("exact_match", ours, theirs)
    assert (found.ours, found.theirs, found.difference.value) == (60, 50, 10)
    assert found.p_value == pytest.approx(2 / 2**10)
    assert (found.verdict, found.chance) == ("above", "p = 0.002")
    assert compare("exact_match", theirs, ours).verdict == "below"
    random.Random(1).shuffle(theirs)
    assert compare("exact_match", ours, theirs).verdict == "not shown"  # the pairs are shuffled


def test_systems_that_differ_nowhere_have_an_interval():
    found = compare("exact_match", [True] * 15, [True] * 15)
    assert (found.difference.value, found.p_value, found.needed) == (0, 1, None)
    assert found.difference.high == -found.difference.low == pytest.approx(21.8, abs=0.05)


def test_the_needed_number_of_questions_has_a_power_of_80_percent_at_5_percent():
    ours = [True] * 20 + [False] * 10 + [True] * 70
    theirs = [False] * 20 + [True] * 10 + [True] * 70
    needed = compare("exact_match", ours, theirs).needed
    assert needed == math.ceil((1.96 + 0.84) ** 2 * (0.3 - 0.1**2) / 0.1**2)


def subset_bounds(differences):
    """The interval by its definition: the means of all subsets, the empty one beyond both ends."""
    means = [
        sum(subset) / len(subset)
        for size in range(1, len(differences) + 1)
        for subset in itertools.combinations(differences, size)
    ]
    outside = math.ceil(0.025 * 2 ** len(differences)) - 1
    means.sort()
    return (100 * means[outside - 1], 100 * means[-outside]) if outside > 0 else (-100, 100)


@pytest.mark.parametrize(
    ("wins", "losses", "ties"),
    [(6, 0, 5), (5, 1, 6), (0, 7, 4), (3, 0, 0)],
)
def test_the_interval_of_the_exact_test_is_that_of_all_subsets(wins, losses, ties):
    ours = [True] * wins + [False] * losses + [True] * ties
    theirs = [False] * wins + [True] * losses + [True] * ties
    found = compare("exact_match", ours, theirs)
    low, high = subset_bounds([1] * wins + [-1] * losses + [0] * ties)
    assert found.difference.low == pytest.approx(low, abs=1e-6)
    assert found.difference.high == pytest.approx(high, abs=1e-6)


def test_an_interval_excludes_0_if_and_only_if_the_test_finds_a_difference():
    verdicts = set()
    for seed in range(60):
        rng = random.Random(seed)
        count, gain = rng.choice([3, 8, 12, 30, 100]), rng.random() / 2
        ours = [rng.random() + gain > 0.6 for _ in range(count)]
        found = compare("exact_match", ours, [rng.random() > 0.6 for _ in range(count)])
        difference = found.difference
        excluded = difference.low > 0 or difference.high < 0
        assert excluded == (found.p_value < SIGNIFICANT), found
        assert difference.low <= difference.value <= difference.high
        verdicts.add(excluded)
    assert verdicts == {True, False}


def test_answers_that_cannot_be_compared_are_an_error():
    for ours, theirs in (([True], [True, False]), ([], [])):
        with pytest.raises(InvalidInputError, match="an answer of both systems to every question"):
            compare("exact_match", ours, theirs)
