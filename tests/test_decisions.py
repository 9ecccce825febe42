"""Typed questions: probabilities of labels, orders of the options, members, states and errors."""

import asyncio
import math
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, Choice, Predicate, RemoteEngine, Score
from adafuse_llm.backends import FakeBackend
from adafuse_llm.decisions import state_text
from adafuse_llm.errors import ContextWindowError, DecodingError, InvalidInputError
from adafuse_llm.serving import create_app
from tests.support import models
from tests.support.deciding import assert_reads_a_state_once
from tests.support.serving import served

pytestmark = pytest.mark.quick

LETTERS = "ABCDEFGH"
STATE = "The ferry to Orrin leaves at nine. It carries twelve people, three goats and the post."
TEAM = Choice("Which team?", {"billing": "payments", "technical": "bugs", "sales": ""})
MOOD = Score("How angry?", ["calm", "concerned", "angry"])
QUESTIONS = {"urgent": Predicate("Is it urgent?"), "team": TEAM, "mood": MOOD}


FORMS = [f"{space}{letter}" for letter in LETTERS for space in ("", " ")]


def moody(name: str, parameters: int | None = None) -> FakeBackend:
    """A member whose probabilities are random, but always the same after the same text."""

    def rule(text: str) -> dict[str, float]:
        draw = random.Random(name + text)
        return {form: draw.random() / 20 for form in FORMS}

    member = FakeBackend(name, rule, FORMS)
    member.parameters = parameters
    return member


def test_one_member_with_one_order_equals_a_plain_forward_pass() -> None:
    recipe = models.CHATTING[0]
    decision = models.engine(recipe).decide(STATE, {"team": TEAM}, orders=1)
    known, model = models.tokenizer(recipe.kind, recipe.template), models.model(recipe)
    prompt = known.encode(
        f"<|im_start|>user\n{STATE}\n\nWhich team?\nA. billing: payments\nB. sales\n"
        "C. technical: bugs\n\nAnswer with the letter only.<|im_end|>\n"
        "<|im_start|>assistant\nAnswer:"
    )

    def probability(text: str) -> float:
        label = known.encode(text)
        with torch.inference_mode():
            rows = model(torch.tensor([prompt + label])).logits[0].log_softmax(-1)
        steps = enumerate(label, start=len(prompt) - 1)
        return math.exp(sum(float(rows[place, token]) for place, token in steps))

    expected = {
        option: probability(label) + probability(f" {label}")
        for option, label in zip(("billing", "sales", "technical"), "ABC", strict=True)
    }
    mass = sum(expected.values())
    fair = {option: p / mass for option, p in expected.items()}
    assert decision["team"].mass == pytest.approx({recipe.name: mass})
    assert decision["team"].probabilities == pytest.approx(fair)


@given(st.permutations(LETTERS.lower()), st.integers(2, 8), st.sampled_from([None, 1, 2, 3]))
def test_no_answer_changes_with_the_order_of_its_options(
    order: list[str], size: int, orders: int | None
) -> None:
    engine = AdaFuseEngine([moody("oak"), moody("elm"), moody("ash")])
    options = [option for option in order if option in LETTERS.lower()[:size]]
    questions = {"as it is": Choice("Which?", options), "sorted": Choice("Which?", sorted(options))}
    answers = engine.decide("A state.", questions, orders=orders, weights=[1, 2, 3])
    assert answers["as it is"] == answers["sorted"]


def test_a_preference_for_a_letter_cancels_over_all_orders() -> None:
    fair = {"dog": 0.4, "cat": 0.3, "owl": 0.2, "fox": 0.1}

    def rule(text: str) -> dict[str, float]:
        listed = enumerate(re.findall(r"^([A-D])\. (\w+)$", text, re.MULTILINE))
        return {f" {label}": fair[pet] * 2**place / 20 for place, (label, pet) in listed}

    engine, question = AdaFuseEngine([FakeBackend("oak", rule, FORMS)]), Choice("Which?", [*fair])
    answer = engine.decide("A state.", {"pet": question})["pet"]
    assert answer.probabilities == pytest.approx(fair)
    assert answer.swayed == ("oak",)
    assert engine.decide("A state.", {"pet": question}, orders=1)["pet"].swayed == ()


def test_many_options_have_numbers_as_labels() -> None:
    question = Choice("?", [f"option {number}" for number in range(255)])
    order, _ = question.orders(None)
    assert "354. option 99\n\nAnswer with the number only." in question.prompt("", order)


WEIGHTS = {"oak": 3, "elm": 1, "ash": 0}
FIT = {"weights": WEIGHTS, "temperature": 2, "intercepts": {"sales": 0.5}, "threshold": 0}


@pytest.mark.parametrize(
    ("options", "rule", "weights"),
    [
        ({}, "largest", {"elm": 4}),
        ({"use": ["oak", "ash"]}, "largest", {"ash": 4}),
        ({"weights": WEIGHTS}, "weights", WEIGHTS),
        ({"decisions": FIT}, "calibrated", WEIGHTS),
        ({"decisions": FIT, "orders": 3}, "largest", {"elm": 4}),
        ({"decisions": FIT, "use": ["oak", "elm", "ash"]}, "largest", {"elm": 4}),
        ({"decisions": FIT, "weights": WEIGHTS}, "weights", WEIGHTS),
    ],
)
def test_an_answer_is_a_weighted_mean_or_that_of_the_largest_member(
    options: Any, rule: str, weights: dict[str, int]
) -> None:
    engine = AdaFuseEngine([moody("oak", 100), moody("elm", 300), moody("ash", 200)])
    decision = engine.decide(STATE, {"team": TEAM}, **options)
    own = engine.decide(STATE, {"team": TEAM})["team"].members
    odds = {
        option: math.prod(own[name][option] ** (weight / 4) for name, weight in weights.items())
        for option in own["oak"]
    }
    if rule == "calibrated":
        odds = {option: math.sqrt(value) for option, value in odds.items()}
        odds["sales"] *= math.exp(0.5)
    fair = {option: value / sum(odds.values()) for option, value in odds.items()}
    assert decision["team"].probabilities == pytest.approx(fair)
    assert decision.strategy == rule
    assert decision["team"].is_sure is (True if rule == "calibrated" else None)


def test_an_answer_is_sure_from_the_threshold_on() -> None:
    engine = AdaFuseEngine([moody("oak")])
    sure = engine.decide(STATE, {"team": TEAM})["team"].confidence
    for threshold, expected in ((sure, True), (sure + 1e-9, False)):
        fit = {"weights": {"oak": 1}, "threshold": threshold}
        assert engine.decide(STATE, {"team": TEAM}, decisions=fit)["team"].is_sure is expected


def test_a_member_that_cannot_read_a_label_takes_no_part() -> None:
    lossy, other = models.LOSSY  # the first member's tokenizer does not know the letter B
    fit = {"weights": {lossy.name: 1, other.name: 1}, "threshold": 0}
    engine, question = models.engine(lossy, other), {"q": Predicate("Is it late?")}
    answer = engine.decide(STATE, question, decisions=fit)["q"]
    assert ([*answer.members], answer.is_sure) == ([other.name], False)
    assert f"member {lossy.name!r} takes no part: its tokenizer cannot write" in answer.warnings[0]
    with pytest.raises(DecodingError, match=r"no member can answer .* takes no part"):
        engine.decide(STATE, question, use=lossy.name)


def test_an_answer_warns_of_labels_with_little_mass() -> None:
    oak = FakeBackend("oak", lambda _: {" A": 0.5, "B": 0.25}, FORMS)
    elm = FakeBackend("elm", lambda _: {" A": 0.04, "B": 0.02}, FORMS)
    answer = AdaFuseEngine([oak, elm]).decide(STATE, {"q": Predicate("Is it late?")})["q"]
    assert answer.mass == pytest.approx({"oak": 0.75, "elm": 0.06})
    assert answer.swayed == ("oak", "elm")  # both prefer A
    assert answer.warnings == ("member 'elm' gives all labels together only a probability of 0.06",)


def test_an_answer_depends_neither_on_the_batch_nor_on_the_door() -> None:
    fit = {"weights": {"oak": 2, "elm": 1}, "temperature": 1.5, "threshold": 0.6}
    engine = AdaFuseEngine([moody("oak"), moody("elm")], AdaFuseConfig(decisions=fit))
    states = [STATE, "Another state.", {"a": [1, None]}]
    decisions = engine.decide_batch(states, QUESTIONS)
    assert decisions == [engine.decide(state, QUESTIONS) for state in states]
    assert engine.decide(STATE, {"team": TEAM})["team"] == decisions[0]["team"]
    assert asyncio.run(engine.adecide(STATE, QUESTIONS)) == decisions[0]
    with served(create_app(engine)) as url, RemoteEngine(url) as remote:
        assert remote.decide(STATE, QUESTIONS) == decisions[0]


def test_members_read_a_state_once_for_all_questions() -> None:
    engine = models.engine(*models.CHATTING)
    assert_reads_a_state_once(engine, models.TEXT[:600].replace("\n", " "), 4)


def test_a_state_is_read_as_json_or_in_the_plain_format() -> None:
    assert state_text({"café": [1, None]}, "the state") == '{"café": [1, null]}'
    assert state_text([{"role": "user", "content": "Help!"}], "the state") == "User: Help!"


@pytest.mark.parametrize(
    ("state", "questions", "options", "message"),
    [
        (" ", QUESTIONS, {}, "the state must be text.* not be empty"),
        ({"a": math.nan}, QUESTIONS, {}, "cannot be written as JSON"),
        ([{"type": "image_url"}], QUESTIONS, {}, "the state has an image; only text"),
        (STATE, {str(n): TEAM for n in range(401)}, {}, "1 to 400 .* got 401"),
        (STATE, {"q": "Is it?"}, {}, "Predicate, Choice or Score"),
        (STATE, QUESTIONS, {"temperature": 1}, "no option 'temperature'; it has orders, use"),
        (STATE, QUESTIONS, {"orders": 0}, "orders must be a whole number above 0"),
        (STATE, QUESTIONS, {"decisions": {"weights": {"elm": 1}}}, "of elm, not of oak. Pass"),
        (STATE, QUESTIONS, {"decisions": {"weights": {"oak": 0}}}, "a weight must be above 0"),
        (STATE * 9, QUESTIONS, {}, "the state with question 'urgent': .* context window"),
    ],
)
def test_bad_input_gets_one_error_before_any_compute(
    state: Any, questions: Any, options: Any, message: str
) -> None:
    member = FakeBackend("oak", lambda _: {"A": 0.5, "B": 0.5}, FORMS, context_window=400)
    with pytest.raises((InvalidInputError, ContextWindowError), match=message):
        AdaFuseEngine([member]).decide(state, questions, **options)
    assert member.passes == 0


@pytest.mark.parametrize("options", [["a"], ["a", " a"], "ab", 5, [*map(str, range(256))], [1, 2]])
def test_a_question_has_2_to_255_different_texts(options: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"2 to 255 different|none that is text"):
        Choice("Which?", options)
