"""Typed questions over HTTP, in both forms: answers, refusals, states, options and errors."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, Choice, Predicate, Score
from adafuse_llm.adapters.questions import to_answer
from adafuse_llm.results import Answer
from adafuse_llm.serving import ServingConfig, create_app
from tests.support.deciding import deciding_engine
from tests.support.serving import served

pytestmark = pytest.mark.quick

STATE = "Stripe fails whenever I connect my account."
QUESTIONS = {
    "urgent": Predicate("Urgent?", yes="today", no="this week"),
    "team": Choice("Which team?", {"true": "bugs", "billing": ""}),
    "mood": Score("How angry?", ["calm", "angry"]),
}
TEAM = {"type": "choice", "instructions": "Which team?"}
PARTS = [{"type": "input_text", "text": "Which team?"}]
CHOICES = [{"value": True, "description": "bugs"}, {"value": "billing"}]
MOOD = {"type": "score", "instructions": "How angry?"}
OPENAI: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "Urgent?", "name": "urgent"},
    {"type": "choice", "instructions": PARTS, "choices": CHOICES},
    {**MOOD, "name": "mood", "levels": [{"label": "calm"}, {"label": "angry"}]},
]
URGENT = {"type": "noul", "instructions": "Urgent?"}
SYSTEM_ONE: dict[str, dict[str, Any]] = {
    "urgent": {**URGENT, "criteria": {"true": "today", "false": "this week"}},
    "team": {**TEAM, "criteria": {"true": "bugs", "billing": None}},
    "mood": {**MOOD, "criteria": ["calm", "angry"]},
}


@pytest.fixture(scope="module")
def engine() -> AdaFuseEngine:
    return deciding_engine(context_window=1200)


@pytest.fixture(scope="module")
def post(engine: AdaFuseEngine) -> Iterator[Any]:
    with served(create_app(engine, ServingConfig())) as url:
        yield lambda path, **body: httpx.post(f"{url}/v1/{path}", json=body)


def test_the_answers_are_those_of_the_engine_in_openais_form(post, engine) -> None:
    questions = {**QUESTIONS, "urgent": Predicate("Urgent?")}
    expected = engine.decide(STATE, questions, weights=[1, 2], orders=1)
    extension = {"weights": [1, 2], "orders": 1}
    sent = {"model": "adafuse", "input": STATE, "questions": OPENAI, "adafuse": extension}
    done = post("decisions", **sent).json()
    whole = [Answer.model_validate(each.pop("adafuse")) for each in done["answers"]]
    assert whole == [*expected.values()]
    urgent, team, mood = done["answers"]
    assert urgent == {"name": "urgent", "type": "predicate", "probability": whole[0].probability}
    assert team["choice"] == {"true": True, "billing": "billing"}[whole[1].choice]
    assert [each["value"] for each in team["probabilities"]] == [True, "billing"]
    assert team["probabilities"][0]["probability"] == whole[1].probabilities["true"]
    calm, angry = whole[2].probabilities.values()
    assert (mood["score"], mood["confidence"]) == (angry, max(calm, angry))
    assert mood["probabilities"] == [
        {"value": 0, "label": "calm", "probability": calm},
        {"value": 1, "label": "angry", "probability": angry},
    ]
    assert done["adafuse"] == {"usage": expected.usage.model_dump(), "strategy": "weights"}
    assert done["usage"]["input_tokens"] == max(expected.usage.prompt_tokens.values())


def test_system_one_has_a_map_of_questions(post, engine) -> None:
    expected = engine.decide({"text": STATE}, QUESTIONS, use="elm")
    sent = {"model": "elm", "state": {"text": STATE}, "questions": SYSTEM_ONE, "seed_": 1}
    done = post("systemone", **sent).json()
    answers = done["answers"]
    whole = {name: Answer.model_validate(each.pop("adafuse")) for name, each in answers.items()}
    assert whole == expected.answers
    written = {name: to_answer(QUESTIONS[name], expected[name]) for name in QUESTIONS}
    assert answers == json.loads(json.dumps(written))
    assert "'seed_' was ignored" in done["adafuse"]["warnings"][0]


def test_a_state_can_be_a_conversation_with_data(post, engine) -> None:
    parts = [{"type": "input_text", "text": "Help! "}, {"type": "input_json", "data": [1]}]
    items = [{"role": "user", "content": parts}]
    (answer,) = post("decisions", input=items, questions=OPENAI[:1]).json()["answers"]
    expected = engine.decide("User: Help! [1]", {"urgent": Predicate("Urgent?")})
    assert answer["adafuse"] == expected["urgent"].model_dump(mode="json")


def test_an_answer_below_the_threshold_is_a_refusal() -> None:
    fit = {"weights": {"oak": 1, "elm": 1}, "threshold": 1}
    with served(create_app(deciding_engine(AdaFuseConfig(decisions=fit)))) as url:
        sent = {"input": STATE, "questions": OPENAI}
        answers = httpx.post(f"{url}/v1/decisions", json=sent).json()["answers"]
    assert [each["type"] for each in answers] == ["refusal"] * 3
    assert not any(each["adafuse"]["is_sure"] for each in answers)


IMAGE = {"type": "input_image", "image_url": "data:,"}
PICTURED = [{"role": "user", "content": [IMAGE]}]
EQUAL = {**TEAM, "choices": [{"value": "a"}, {"value": "b"}, {"value": "a"}]}


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"input": " "}, "input", "must be text, messages.* not be empty"),
        ({"input": ["a"]}, "input", "should be a valid string"),
        ({"input": PICTURED}, "input", "the request has an image; only text is allowed"),
        ({"questions": [{"type": "box", "instructions": "?"}]}, "questions.0", "choice or score"),
        ({"questions": [EQUAL]}, "questions.0", "2 to 255 different options; got 3"),
        ({"questions": [{**TEAM, "choices": "ab"}]}, "questions.0", "different options; got 0"),
        ({"questions": {"q": {"type": "noul"}}, "state": "a"}, "questions.q", "an empty text"),
        ({"questions": SYSTEM_ONE, "state": ""}, "state", "must be text.* not be empty"),
        ({"stream": True}, "stream", "not supported: answers have no text"),
        ({"input": STATE * 500}, "input", "have 2[0-9]+ characters"),
        ({"input": "a b" * 440}, "input", "question '0': .* context window"),
    ],
)
def test_bad_input_gets_one_error(post, changes, param, message) -> None:
    answer = post("decisions", **{"input": STATE, "questions": OPENAI, **changes})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert re.search(message, error["message"])
    assert error["param"] == param
