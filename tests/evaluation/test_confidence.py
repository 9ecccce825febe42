"""The calibration of the confidence: what it fits, and what is measured of it."""

import numpy as np
import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.evaluation.comparison import share
from adafuse_llm.evaluation.confidence import calibrate, reliability


def answers(count, seed=1):
    """Features of answers. Known coefficients give the probability that each one is right."""
    rng = np.random.default_rng(seed)
    sums = -rng.exponential(3.0, size=(count, 2))
    rows = np.column_stack((sums.mean(axis=1), sums, rng.random(count), rng.integers(1, 9, count)))
    chance = 1 / (1 + np.exp(-(2 + 0.8 * rows[:, 1] - 0.2 * rows[:, 4])))
    return rows.tolist(), (rng.random(count) < chance).tolist(), chance


def test_a_known_curve_is_recovered():
    rows, rights, chance = answers(4000)
    worth = calibrate("mixture", ["one", "two"], rows, rights)
    found = worth.calibration
    assert found is not None
    assert found.members["one"] + found.logprob / 2 == pytest.approx(0.8, abs=0.1)
    assert found.members["two"] + found.logprob / 2 == pytest.approx(0.0, abs=0.1)
    assert found.length == pytest.approx(-0.2, abs=0.05)
    best = reliability(chance.tolist(), rights)
    assert worth.area.value == pytest.approx(best.area.value, abs=1)
    assert worth.area.low < best.area.value < worth.area.high
    assert worth.error < 3
    assert worth.curve[-1].right.value == pytest.approx(100 * np.mean(rights))
    assert [each.answered for each in worth.curve] == [*range(10, 101, 10)]
    assert worth.curve[0].right.value > 75 > worth.curve[-1].right.value


def test_noise_gives_a_confidence_without_worth():
    rows, rights, _ = answers(60)
    rng = np.random.default_rng(2)
    rng.shuffle(rights)
    worth = calibrate("mixture", ["one", "two"], rows, rights)
    assert worth.area.low < 50 < worth.area.high


@pytest.mark.parametrize(
    ("count", "right", "message"), [(49, 20, "50 .* got 20"), (60, 4, "5 .* got 4 right and 56")]
)
def test_too_few_answers_are_an_error(count, right, message):
    rights = [place < right for place in range(count)]
    with pytest.raises(InvalidInputError, match=message):
        calibrate("mixture", ["one", "two"], answers(count)[0], rights)


def test_worth_by_hand():
    found = reliability([0.9, 0.8, 0.7, 0.6, 0.1], [True, True, False, True, False])
    assert found.area.value == pytest.approx(100 * 5 / 6)
    assert found.error == pytest.approx(100 * (0.1 + 0.2 + 0.7 + 0.4 + 0.1) / 5)
    assert [round(each.right.value) for each in found.curve[1::2]] == [100, 100, 67, 75, 60]
    sure = reliability([0.9] * 20 + [0.1] * 20, [True] * 20 + [False] * 20).area
    assert (sure.value, sure.high) == (100, 100)
    assert sure.low < 90


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [(0, 20, 0, 16.84), (20, 20, 83.16, 100), (10, 100, 4.90, 17.62), (7, 10, 34.75, 93.33)],
)
def test_the_exact_interval_of_a_share(hits, total, low, high):
    found = share(hits, total)
    assert [found.low, found.high] == pytest.approx([low, high], abs=0.01)
