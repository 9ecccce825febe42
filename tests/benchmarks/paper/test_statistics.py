"""Intervals and tests compared with manual arithmetic, and with scipy if it is installed."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from adafuse_llm import InvalidInputError
from benchmarks.paper.metrics import load_metric
from benchmarks.paper.statistics import SIGNIFICANT, compare, interval, mcnemar

EXACT, F1 = load_metric("exact_match"), load_metric("f1")


def rights(values):
    return [(float(value), 1.0) for value in values]


def drawn(share, count, seed):
    rng = random.Random(seed)
    return [rng.random() < share for _ in range(count)]


def test_an_interval_has_the_width_of_the_normal_approximation():
    values = [True] * 300 + [False] * 100
    score = interval(EXACT, rights(values))
    half = 100 * 1.96 * math.sqrt(0.75 * 0.25 / 400)
    assert score.value == 75
    assert score.low == pytest.approx(75 - half, abs=0.6)
    assert score.high == pytest.approx(75 + half, abs=0.6)


def test_intervals_contain_the_true_value_in_about_95_percent_of_samples():
    held = 0
    for seed in range(80):
        score = interval(EXACT, rights(drawn(0.6, 200, seed)), samples=300, seed=seed)
        held += score.low <= 60 <= score.high
    assert 0.88 <= held / 80 <= 0.995


@pytest.mark.quick
def test_the_same_seed_gives_the_same_interval():
    rng = random.Random(1)
    answers = rights(rng.random() for _ in range(50))
    assert interval(F1, answers) == interval(F1, answers)
    assert interval(F1, answers) != interval(F1, answers, seed=2)


@pytest.mark.parametrize("answers", [1, 5, 25])
def test_r3_d1_the_interval_of_only_right_answers_has_a_width(answers):
    """The bound is that of Clopper and Pearson."""
    right = interval(EXACT, rights([True] * answers))
    assert (right.value, right.high) == (100, 100)
    assert (right.low / 100) ** answers == pytest.approx(0.025)
    wrong = interval(EXACT, rights([False] * answers))
    assert (wrong.value, wrong.low) == (0, 0)
    assert wrong.high == pytest.approx(100 - right.low)


def test_r3_d1_systems_that_differ_nowhere_have_an_interval():
    found = compare(EXACT, rights([True] * 15), rights([True] * 15))
    assert (found.difference.value, found.p_value, found.needed) == (0, 1, None)
    assert found.difference.high == -found.difference.low == pytest.approx(21.8, abs=0.05)


def test_r3_d1_the_needed_number_of_questions_shows_the_difference_in_four_of_five_attempts():
    ours = [True] * 20 + [False] * 10 + [True] * 70
    theirs = [False] * 20 + [True] * 10 + [True] * 70
    needed = compare(EXACT, rights(ours), rights(theirs)).needed
    assert needed == math.ceil(2.8**2 * (0.3 - 0.1**2) / 0.1**2)
    rng = random.Random(3)
    shown = 0
    for _ in range(200):
        drawn = [rng.randrange(100) for _ in range(needed)]
        left, right = ([answers[each] for each in drawn] for answers in (ours, theirs))
        shown += compare(EXACT, rights(left), rights(right)).verdict == "above"
    assert shown / 200 == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize(
    ("only_ours", "only_theirs", "p_value"),
    [
        (0, 0, 1.0),
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (3, 3, 1.0),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
    ],
)
def test_mcnemar_by_hand(only_ours, only_theirs, p_value):
    ours = [True] * only_ours + [False] * only_theirs + [True, False]
    theirs = [False] * only_ours + [True] * only_theirs + [True, False]
    assert mcnemar(ours, theirs) == pytest.approx(p_value)


def test_mcnemar_equals_the_binomial_test_of_scipy_for_many_answers():
    scipy = pytest.importorskip("scipy.stats")
    for ours, theirs in ((40, 60), (700, 800), (1500, 1500), (2000, 1200)):
        exact = scipy.binomtest(min(ours, theirs), ours + theirs).pvalue
        left = [True] * ours + [False] * theirs
        assert mcnemar(left, [not each for each in left]) == pytest.approx(min(1.0, exact))


@pytest.mark.quick
def test_systems_are_compared_question_by_question():
    ours = [True] * 60 + [False] * 40
    theirs = [True] * 50 + [False] * 50
    found = compare(EXACT, rights(ours), rights(theirs))
    assert (found.ours, found.theirs, found.difference.value) == (60, 50, 10)
    assert found.p_value == pytest.approx(2 / 2**10)
    assert found.test == "McNemar's exact test"
    assert found.difference.low > 0
    shuffled = theirs.copy()
    random.Random(1).shuffle(shuffled)
    assert compare(EXACT, rights(ours), rights(shuffled)).p_value > 0.05  # the pairs are shuffled


def test_a_system_against_itself_shows_no_difference():
    answers = [(0.1 * (number % 7), 1.0) for number in range(40)]
    found = compare(F1, answers, answers)
    assert found.difference.value == 0
    assert found.difference.high == -found.difference.low == pytest.approx(8.81, abs=0.005)
    assert found.p_value == 1
    assert found.test == "random subsets"


@pytest.mark.quick
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
    found = compare(F1, rights(ours), rights(theirs), samples=5000)
    assert 0.02 < exact < 0.9
    assert found.p_value == pytest.approx(exact, abs=0.03)


def test_equal_systems_rarely_differ_significantly():
    false_alarms = {"exact": 0, "f1": 0}
    for seed in range(60):
        rng = random.Random(seed)
        pairs = [(rng.random(), rng.random()) for _ in range(40)]
        left, right = zip(*pairs, strict=True)
        f1s = compare(F1, rights(left), rights(right), samples=200, seed=seed)
        exact = compare(
            EXACT, *(rights(v > 0.5 for v in side) for side in (left, right)), samples=2
        )
        false_alarms["f1"] += f1s.p_value < 0.05
        false_alarms["exact"] += exact.p_value < 0.05
    assert max(false_alarms.values()) <= 8  # 3 expected


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


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wins", "losses", "ties"),
    [(3, 0, 9), (6, 0, 0), (6, 0, 5), (5, 1, 6), (0, 7, 4), (2, 2, 8), (3, 0, 0)],
)
def test_s7_the_interval_of_the_exact_test_is_that_of_all_subsets(wins, losses, ties):
    ours = [True] * wins + [False] * losses + [True] * ties
    theirs = [False] * wins + [True] * losses + [True] * ties
    found = compare(EXACT, rights(ours), rights(theirs))
    low, high = subset_bounds([1] * wins + [-1] * losses + [0] * ties)
    assert found.difference.low == pytest.approx(low, abs=1e-6)
    assert found.difference.high == pytest.approx(high, abs=1e-6)


@pytest.mark.quick
def test_s7_the_interval_of_random_subsets_is_that_of_all_subsets():
    rng = random.Random(2)
    pairs = [(rng.random(), rng.random()) for _ in range(12)]
    low, high = subset_bounds([left - right for left, right in pairs])
    left, right = zip(*pairs, strict=True)
    found = compare(F1, rights(left), rights(right), samples=8000).difference
    assert found.low == pytest.approx(low, abs=2)
    assert found.high == pytest.approx(high, abs=2)


@pytest.mark.quick
def test_s7_an_interval_excludes_0_if_and_only_if_the_test_finds_a_difference():
    verdicts = set()
    for seed in range(60):
        rng = random.Random(seed)
        count, gain = rng.choice([3, 8, 12, 30, 100]), rng.random() / 2
        left = [min(1.0, rng.random() + gain) for _ in range(count)]
        right = [rng.random() for _ in range(count)]
        for found in (
            compare(F1, rights(left), rights(right), samples=500, seed=seed),
            compare(EXACT, *(rights(value > 0.6 for value in side) for side in (left, right))),
        ):
            difference = found.difference
            excluded = difference.low > 0 or difference.high < 0
            assert excluded == (found.p_value < SIGNIFICANT), found
            assert difference.low <= difference.value <= difference.high
            verdicts.add((found.test, excluded))
    assert len(verdicts) == 4


def test_s7_intervals_of_differences_contain_the_true_one_in_about_95_percent_of_samples():
    for count, gain, loss in ((20, 0.5, 0.0), (60, 0.3, 0.1), (60, 0.1, 0.1)):
        held = 0
        for seed in range(200):
            rng = random.Random(seed)
            draws = [rng.random() for _ in range(count)]
            ours = [draw < gain for draw in draws]
            theirs = [gain <= draw < gain + loss for draw in draws]
            found = compare(EXACT, rights(ours), rights(theirs)).difference
            held += found.low <= 100 * (gain - loss) <= found.high
        assert held / 200 >= 0.91


def test_intervals_and_tests_of_chrf_use_the_corpus_score():
    pytest.importorskip("sacrebleu")
    chrf = load_metric("chrf")
    known = [f"the keeper of light number {number} was here" for number in range(12)]
    better = [chrf.statistics(text.replace("keeper", "kepper"), [text]) for text in known]
    worse = [chrf.statistics(text[::-1], [text]) for text in known]
    score = interval(chrf, better, samples=200)
    assert score.low <= score.value <= score.high < 100
    found = compare(chrf, better, worse, samples=300)
    assert found.ours == score.value
    assert found.p_value == pytest.approx(2 / 301)
    assert found.difference.low > 0


def test_answers_that_cannot_be_compared_are_an_error():
    with pytest.raises(InvalidInputError, match="an answer of both systems to every question"):
        compare(EXACT, rights([True]), rights([True, False]))
    with pytest.raises(InvalidInputError, match="no answers"):
        interval(EXACT, [])
