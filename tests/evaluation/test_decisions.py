"""Fits of decisions: weights, temperature, intercepts, and what they are worth."""

import json

import numpy as np
import pytest

from adafuse_llm import Choice, InvalidInputError, Score
from adafuse_llm.evaluation.confidence import Array
from adafuse_llm.evaluation.decisions import fit_decisions, flips, read_labeled

QUESTIONS = 400


def drawn(
    options: int, scales: tuple[float, ...], bias: float = 0.0
) -> tuple[list[Array], list[int]]:
    """Draw questions: each member knows a part of the truth, times a scale, with a bias."""
    rng = np.random.default_rng(1)
    logprobs, rights = [], []
    for _ in range(QUESTIONS):
        parts = rng.normal(size=(len(scales), options)) * 1.5
        known = np.array([scale > 0 for scale in scales])
        truth = np.exp(parts[known].sum(axis=0))
        rights.append(int(rng.choice(options, p=truth / truth.sum())))
        scores = parts * np.abs(np.array(scales))[:, None] + np.arange(options) * bias
        logprobs.append(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))
    return logprobs, rights


def test_a_fit_finds_weights_temperature_and_intercepts() -> None:
    logprobs, rights = drawn(2, (2.0, 1.0, -1.0), bias=3.0)  # the truth: 1/2 and 1 of them, no bias
    fit = fit_decisions(["oak", "elm", "ash"], logprobs, rights, labels=["yes", "no"])
    assert fit.weights == pytest.approx({"oak": 1 / 3, "elm": 2 / 3, "ash": 0}, abs=0.07)
    assert fit.temperature == pytest.approx(1 / 1.5, abs=0.1)
    assert fit.intercepts["yes"] - fit.intercepts["no"] == pytest.approx(4.5, abs=0.7)
    assert fit.error < 5
    assert fit.accuracy.value > max(fit.alone[name].value for name in fit.alone)
    assert fit.area is not None
    assert fit.area.value > 85


def test_questions_can_have_different_numbers_of_options() -> None:
    (few, right), (many, others) = drawn(2, (1.0, -1.0)), drawn(4, (1.0, -1.0))
    fit = fit_decisions(["oak", "elm"], [*few, *many], [*right, *others])
    assert fit.weights == {"oak": 1, "elm": 0}
    assert fit.temperature == pytest.approx(1, abs=0.15)
    assert (fit.questions, fit.intercepts, fit.area) == (2 * QUESTIONS, {}, None)


def test_members_that_know_nothing_leave_equal_probabilities() -> None:
    logprobs, rights = drawn(3, (-1.0, -1.0))
    fit = fit_decisions(["oak", "elm"], logprobs, rights)
    assert sum(fit.weights.values()) == pytest.approx(1)
    assert fit.curve[0].confidence < 0.45
    assert (fit.threshold, fit.coverage) == (None, 0)


def test_a_member_that_prefers_wrong_options_does_not_count() -> None:
    logprobs, rights = drawn(2, (1.0, 0.5))
    misled = [np.stack([-each[0], each[1]]) for each in logprobs]
    fit = fit_decisions(["oak", "elm"], misled, rights, labels=["yes", "no"])
    assert fit.weights == {"oak": 0, "elm": 1}
    assert fit.accuracy.value == fit.alone["elm"].value > 60


def test_the_threshold_allows_few_enough_wrong_answers() -> None:
    logprobs, rights = drawn(2, (1.0, 1.0))
    fit = fit_decisions(["oak", "elm"], logprobs, rights, most_wrong=10)
    at = next(each for each in fit.curve if each.answered == fit.coverage)
    assert at.confidence == fit.threshold
    assert 90 < at.right.value < 100
    assert at.right.value > fit.accuracy.value
    assert fit_decisions(["oak", "elm"], logprobs, rights, most_wrong=40).coverage == 100


def test_beta_is_the_share_that_all_members_get_wrong() -> None:
    rights = [0, 1] * 40
    oak = np.array([[-0.1, -3.0], [-3.0, -0.1]])[rights]
    oak[:20] = oak[:20, ::-1]  # oak is wrong about 20, and elm about 10 of these and 10 others
    elm = np.array([[-0.1, -3.0], [-3.0, -0.1]])[rights]
    elm[10:30] = elm[10:30, ::-1]
    fit = fit_decisions(["oak", "elm"], [*np.stack([oak, elm], axis=1)], rights)
    assert fit.alone["oak"].value == fit.alone["elm"].value == 75
    assert fit.beta.value == 12.5
    assert fit.beta.low < 7 < 21 < fit.beta.high


def test_a_state_is_in_one_fold_only() -> None:
    rights = [number % 2 for number in range(10) for _ in range(6)]
    states = [number for number in range(10) for _ in range(6)]
    known, labels = [np.zeros((1, 2))] * 60, ["yes", "no"]
    fit = fit_decisions(["oak"], known, rights, labels=labels, groups=states)
    assert fit.accuracy.value == 0  # the other states have more of the other label


def test_flips_count_questions_whose_answer_depends_on_the_order() -> None:
    same, other = np.array([[-1.0, -2.0], [-1.0, -3.0]]), np.array([[-1.0, -2.0], [-2.0, -1.0]])
    assert flips([same, other, same, same]).value == 25


@pytest.mark.parametrize(
    ("rights", "states", "message"),
    [
        ([0, 1] * 24, 48, "a fit needs 50 .* got 48 of 48 states; by option: 24, 24"),
        ([0] * 46 + [1] * 4, 50, "by option: 46, 4"),
        ([0, 1] * 30, 9, "10 states, .* got 60 of 9 states"),
    ],
)
def test_a_fit_needs_enough_questions(rights: list[int], states: int, message: str) -> None:
    known, groups = [np.zeros((1, 2))] * len(rights), [n % states for n in range(len(rights))]
    with pytest.raises(InvalidInputError, match=message):
        fit_decisions(["oak"], known, rights, labels=["yes", "no"], groups=groups)


def test_lines_can_have_a_choice_or_a_scale() -> None:
    options = {"sales": "", "bugs": "it fails"}
    item = {"question": "Which?", "options": options, "answer": "sales"}
    kinds = ["choice", "score"] * 30
    lines = [json.dumps({**item, "state": [n], "kind": kind}) for n, kind in enumerate(kinds)]
    choice, scale, *_ = read_labeled("\n".join(lines).encode())
    assert (choice.question, choice.options[choice.right]) == (Choice("Which?", options), "sales")
    assert (scale.question, scale.options) == (Score("Which?", options), ["sales", "bugs"])
