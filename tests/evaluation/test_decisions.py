"""Fits of decisions: weights, temperature, intercepts, and what they are worth."""

import json
from collections.abc import Sequence
from threading import Event
from typing import Any

import numpy as np
import pytest

from adafuse_llm import AdaFuseEngine, Answer, Choice, Predicate, Score
from adafuse_llm.backends import FakeBackend
from adafuse_llm.errors import DecodingError, InvalidInputError
from adafuse_llm.evaluation.confidence import softmax
from adafuse_llm.evaluation.decisions import Labeled, fit_decisions, measured, read_labeled

MEMBERS = ("oak", "elm", "ash")


def answered(*likely: Sequence[float], swayed: tuple[str, ...] = ()) -> Answer:
    """An answer with the probabilities of the first members."""
    named: Any = zip(MEMBERS, likely, strict=False)
    members = {name: dict(zip("abcd", own, strict=False)) for name, own in named}
    return Answer(probabilities=members["oak"], members=members, mass={}, swayed=swayed)


def labeled(rights: Sequence[int], options: int = 2, states: int = 400) -> list[Labeled]:
    """Questions about a number of states. With two options, the answer is yes or no."""
    question = Predicate("Is it?") if options == 2 else Choice("Which?", [*"abcd"[:options]])
    names = question.orders(1)[0]
    return [Labeled(str(n % states), question, names[right]) for n, right in enumerate(rights)]


def drawn(
    options: int, scales: tuple[float, ...], bias: float = 0.0
) -> tuple[list[Labeled], list[Answer]]:
    """Draw questions: each member knows a part of the truth, times a scale, with a bias."""
    rng = np.random.default_rng(1)
    rights, answers = [], []
    for _ in range(400):
        parts = rng.normal(size=(len(scales), options)) * 1.5
        truth = parts[np.array(scales) > 0].sum(axis=0)
        rights.append(int(rng.choice(options, p=softmax(truth))))
        scores = parts * np.abs(np.array(scales))[:, None] + np.arange(options) * bias
        answers.append(answered(*softmax(scores)))
    return labeled(rights, options), answers


def test_a_fit_finds_weights_temperature_and_intercepts() -> None:
    fit = fit_decisions(*drawn(2, (2.0, 1.0, -1.0), bias=3.0))
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
    fit = fit_decisions([*few, *many], [*read, *others])
    assert fit.calibration.weights == {"oak": 1, "elm": 0}
    assert fit.calibration.temperature == pytest.approx(1, abs=0.15)
    assert (fit.questions, fit.calibration.intercepts, fit.area) == (800, {}, None)


def test_members_that_know_nothing_leave_equal_probabilities() -> None:
    fit = fit_decisions(*drawn(3, (-1.0, -1.0)))
    assert sum(fit.calibration.weights.values()) == pytest.approx(1)
    assert fit.curve[0].confidence < 0.45
    assert (fit.calibration.threshold, fit.coverage) == (None, 0)


def test_a_member_that_prefers_wrong_options_does_not_count() -> None:
    questions, answers = drawn(2, (1.0, 0.5))
    own = [[[*each.values()] for each in answer.members.values()] for answer in answers]
    fit = fit_decisions(questions, [answered(oak[::-1], elm) for oak, elm in own])
    assert fit.calibration.weights == {"oak": 0, "elm": 1}
    assert fit.accuracy.value == fit.alone["elm"].value > 60


def test_a_member_that_hardly_varies_can_know_everything() -> None:
    rights = [0, 1] * 40
    fit = fit_decisions(labeled(rights), [answered([0.5 - r * 1e-4, 0.5]) for r in rights])
    assert fit.accuracy.value == 100
    assert fit.curve[-1].confidence > 0.9


def test_the_threshold_allows_few_enough_wrong_answers() -> None:
    known = drawn(2, (1.0, 1.0))
    fit = fit_decisions(*known, most_wrong=10)
    at = next(each for each in fit.curve if each.answered == fit.coverage)
    assert at.confidence == fit.calibration.threshold
    assert 90 < at.right.value < 100
    assert at.right.value > fit.accuracy.value
    assert fit_decisions(*known, most_wrong=40).coverage == 100


def test_beta_and_flips_count_what_no_choice_and_no_single_order_can_mend() -> None:
    answers = []
    for number in range(80):  # oak is wrong about 20, and elm about 10 of these and 10 others
        good, bad = ([1.0, 0.0], [0.0, 1.0])[:: -1 if number % 2 else 1]  # rounded
        wrong = [number < 20, 10 <= number < 30]
        own = [(bad if each else good) for each in wrong]
        answers.append(answered(*own, swayed=("oak",) if number < 8 else ()))
    fit = fit_decisions(labeled([0, 1] * 40), answers)
    assert fit.alone["oak"].value == fit.alone["elm"].value == 75
    assert fit.beta.value == 12.5
    assert fit.beta.low < 7 < 21 < fit.beta.high
    assert (fit.flips["oak"].value, fit.flips["elm"].value) == (10, 0)


def test_a_state_is_in_one_fold_only() -> None:
    rights = [number % 2 for number in range(10)] * 6
    fit = fit_decisions(labeled(rights, states=10), [answered([0.5, 0.5])] * 60)
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
    with pytest.raises(InvalidInputError, match=message):
        fit_decisions(labeled(rights, states=states), [answered([0.5, 0.5])] * len(rights))


def test_a_member_that_cannot_answer_is_named() -> None:
    oak = FakeBackend("oak", lambda _: {" A": 0.5, " B": 0.5}, [" A", " B"])
    elm = FakeBackend("elm", lambda _: {" A": 1.0}, [" A", " B"])
    asked = Labeled("A state.", Predicate("Is it?"), "yes", line=7)
    with pytest.raises(DecodingError, match=r"line 7: member 'elm' takes no part.* with --use"):
        next(measured(AdaFuseEngine([oak, elm]), [asked], Event()))


def test_lines_can_have_a_choice_or_a_scale() -> None:
    options = {"sales": "", "bugs": "it fails"}
    item = {"question": "Which?", "options": options, "answer": "sales"}
    kinds = ["choice", "score"] * 30
    lines = [json.dumps({**item, "state": [n], "type": kind}) for n, kind in enumerate(kinds)]
    choice, scale, *_ = read_labeled("\n".join(lines).encode())
    assert (choice.question, choice.right, choice.line) == (Choice("Which?", options), "sales", 1)
    assert (scale.question, scale.options) == (Score("Which?", options), ["sales", "bugs"])
