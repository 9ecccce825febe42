"""Fits of decisions: weights, temperature, intercepts, and what they are worth."""

import json

import numpy as np
import pytest

from adafuse_llm import Choice, InvalidInputError, Predicate, Score
from adafuse_llm.evaluation.confidence import Array
from adafuse_llm.evaluation.decisions import Labeled, fit_decisions, read_labeled

YES_OR_NO = Predicate("Is it?")


def labeled(rights: list[int], options: int = 2) -> list[Labeled]:
    """Questions about different states."""
    names = [f"option {number}" for number in range(options)]
    question = YES_OR_NO if options == 2 else Choice("Which?", names)
    known = question.orders(1)[0]
    return [Labeled(str(number), question, known[right]) for number, right in enumerate(rights)]


def drawn(
    options: int, scales: tuple[float, ...], bias: float = 0.0
) -> tuple[list[Labeled], list[Array]]:
    """Draw questions: each member knows a part of the truth, times a scale, with a bias."""
    rng = np.random.default_rng(1)
    logprobs, rights = [], []
    for _ in range(400):
        parts = rng.normal(size=(len(scales), options)) * 1.5
        known = np.array([scale > 0 for scale in scales])
        truth = np.exp(parts[known].sum(axis=0))
        rights.append(int(rng.choice(options, p=truth / truth.sum())))
        scores = parts * np.abs(np.array(scales))[:, None] + np.arange(options) * bias
        logprobs.append((scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))[None])
    return labeled(rights, options), logprobs


def test_a_fit_finds_weights_temperature_and_intercepts() -> None:
    fit = fit_decisions(["oak", "elm", "ash"], *drawn(2, (2.0, 1.0, -1.0), bias=3.0))
    found = fit.calibration  # the truth: 1/2 of oak and 1 of elm, without a bias
    assert found.weights == pytest.approx({"oak": 1 / 3, "elm": 2 / 3, "ash": 0}, abs=0.07)
    assert found.temperature == pytest.approx(1 / 1.5, abs=0.1)
    assert found.intercepts["yes"] - found.intercepts["no"] == pytest.approx(4.5, abs=0.7)
    assert fit.error < 5
    assert fit.accuracy.value > max(fit.alone[name].value for name in fit.alone)
    assert fit.area is not None
    assert fit.area.value > 85


def test_questions_can_have_different_numbers_of_options() -> None:
    (few, read), (many, others) = drawn(2, (1.0, -1.0)), drawn(4, (1.0, -1.0))
    fit = fit_decisions(["oak", "elm"], [*few, *many], [*read, *others])
    assert fit.calibration.weights == {"oak": 1, "elm": 0}
    assert fit.calibration.temperature == pytest.approx(1, abs=0.15)
    assert (fit.questions, fit.calibration.intercepts, fit.area) == (800, {}, None)


def test_members_that_know_nothing_leave_equal_probabilities() -> None:
    fit = fit_decisions(["oak", "elm"], *drawn(3, (-1.0, -1.0)))
    assert sum(fit.calibration.weights.values()) == pytest.approx(1)
    assert fit.curve[0].confidence < 0.45
    assert (fit.calibration.threshold, fit.coverage) == (None, 0)


def test_a_member_that_prefers_wrong_options_does_not_count() -> None:
    questions, logprobs = drawn(2, (1.0, 0.5))
    fit = fit_decisions(["oak", "elm"], questions, [each * [[-1], [1]] for each in logprobs])
    assert fit.calibration.weights == {"oak": 0, "elm": 1}
    assert fit.accuracy.value == fit.alone["elm"].value > 60


def test_a_member_that_hardly_varies_can_know_everything() -> None:
    rights = [0, 1] * 40
    fit = fit_decisions(["oak"], labeled(rights), [*(1e-4 * np.eye(2)[rights])[:, None, None]])
    assert fit.accuracy.value == 100
    assert fit.curve[-1].confidence > 0.9


def test_the_threshold_allows_few_enough_wrong_answers() -> None:
    known = drawn(2, (1.0, 1.0))
    fit = fit_decisions(["oak", "elm"], *known, most_wrong=10)
    at = next(each for each in fit.curve if each.answered == fit.coverage)
    assert at.confidence == fit.calibration.threshold
    assert 90 < at.right.value < 100
    assert at.right.value > fit.accuracy.value
    assert fit_decisions(["oak", "elm"], *known, most_wrong=40).coverage == 100


def test_beta_and_flips_count_what_no_choice_and_no_single_order_can_mend() -> None:
    rights = [0, 1] * 40
    oak = np.array([[-0.1, -3.0], [-3.0, -0.1]])[rights]
    oak[:20] = oak[:20, ::-1]  # oak is wrong about 20, and elm about 10 of these and 10 others
    elm = np.array([[-0.1, -3.0], [-3.0, -0.1]])[rights]
    elm[10:30] = elm[10:30, ::-1]
    orders = np.stack([[oak, elm], [oak, elm]])  # [orders, members, questions, options]
    orders[:, 0, :8] += [[[0, 9]], [[9, 0]]]  # which is far more than the difference
    fit = fit_decisions(["oak", "elm"], labeled(rights), [*orders.transpose(2, 0, 1, 3)])
    assert fit.alone["oak"].value == fit.alone["elm"].value == 75
    assert fit.beta.value == 12.5
    assert fit.beta.low < 7 < 21 < fit.beta.high
    assert (fit.flips["oak"].value, fit.flips["elm"].value) == (10, 0)


def test_a_state_is_in_one_fold_only() -> None:
    states = [number for number in range(10) for _ in range(6)]
    questions = [Labeled(str(each), YES_OR_NO, ("yes", "no")[each % 2]) for each in states]
    fit = fit_decisions(["oak"], questions, [np.zeros((1, 1, 2))] * 60)
    assert fit.accuracy.value == 0  # the other states have more of the other label


@pytest.mark.parametrize(
    ("rights", "states", "message"),
    [
        ([0, 1] * 24, 48, "a fit needs 50 .* got 48 of 48 states; by option: 24, 24"),
        ([0] * 46 + [1] * 4, 50, "by option: 46, 4"),
        ([0, 1] * 30, 9, "10 states, .* got 60 of 9 states"),
    ],
)
def test_a_fit_needs_enough_questions(rights: list[int], states: int, message: str) -> None:
    names = [("yes", "no")[right] for right in rights]
    questions = [Labeled(str(n % states), YES_OR_NO, name) for n, name in enumerate(names)]
    with pytest.raises(InvalidInputError, match=message):
        fit_decisions(["oak"], questions, [np.zeros((1, 1, 2))] * len(rights))


def test_lines_can_have_a_choice_or_a_scale() -> None:
    options = {"sales": "", "bugs": "it fails"}
    item = {"question": "Which?", "options": options, "answer": "sales"}
    kinds = ["choice", "score"] * 30
    lines = [json.dumps({**item, "state": [n], "type": kind}) for n, kind in enumerate(kinds)]
    choice, scale, *_ = read_labeled("\n".join(lines).encode())
    assert (choice.question, choice.right, choice.line) == (Choice("Which?", options), "sales", 1)
    assert (scale.question, scale.options) == (Score("Which?", options), ["sales", "bugs"])
