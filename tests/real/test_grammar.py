"""Responses of a given form by real members: each is valid, and few end at their limit."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine
from tests.support.schemas import is_valid

pytestmark = pytest.mark.real
pytest.importorskip("llguidance")

TEAMS = (
    ("smollm",),
    ("smollm", "gemma"),
    ("qwen",),
    ("smollm", "qwen"),
    ("gemma",),
    ("qwen", "gemma"),
    ("smollm", "gemma", "qwen"),
)
"""Members of requests. Each form is asked of the next team."""

TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "number"}
WHOLE: dict[str, Any] = {"type": "integer"}
FLAG: dict[str, Any] = {"type": "boolean"}


def listed(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def text_of(name: str) -> dict[str, Any]:
    return {"type": "string", "format": name}


def maybe(kind: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [kind, {"type": "null"}]}


def record(optional: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """The schema of an object. Fields that are not optional are required."""
    required = [name for name in fields if name not in optional]
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": fields, "required": required, **closed}


SIZE = {"enum": ["small", "medium", "large"]}
MOOD = {"enum": ["positive", "neutral", "negative"]}

SCHEMAS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("What is 12 times 12?", WHOLE),
    ("How likely is rain in London tomorrow?", {**NUMBER, "minimum": 0, "maximum": 1}),
    ("Rate this film from 1 to 5: 'A boring story.'", {**WHOLE, "minimum": 1, "maximum": 5}),
    ("What is the website of Wikipedia?", text_of("uri")),
    ("When does the meeting on 3 May 2024 at 9 o'clock begin?", text_of("date-time")),
    ("What is the address of this computer?", text_of("ipv4")),
    ("Create an identifier.", text_of("uuid")),
    ("On which host does Wikipedia run?", text_of("hostname")),
    ("Name three primary colours.", listed(TEXT, minItems=3, maxItems=3)),
    ("Give the temperatures of a week in May.", listed(NUMBER, maxItems=7)),
    ("Anna is 31 years old and lives in Oslo.", record(name=TEXT, age=WHOLE, city=TEXT)),
    ("'Never again.'", record(mood=MOOD, confidence={**NUMBER, "exclusiveMinimum": 0})),
    ("Order two coffees and one tea.", listed(record(item=TEXT, count=WHOLE))),
    ("Is 7 a prime number?", record(answer=FLAG, reason=TEXT)),
    ("Call Ann.", record(name=TEXT, phone=maybe(TEXT))),
    ("A red ball.", record(("size", "price"), colour=TEXT, size=SIZE, price=NUMBER)),
    ("Paris, France.", record(city=TEXT, country=record(name=TEXT, code=TEXT))),
    ("A point at 3, 4.", record(point={**listed(NUMBER, minItems=2), "maxItems": 2})),
    ("Set a timer of 10 minutes.", record(duration=text_of("duration"))),
    ("My code is AB-123.", record(code={**TEXT, "pattern": "^[A-Z]{2}-[0-9]{3}$"})),
    ("Write a short note.", record(note={**TEXT, "maxLength": 40})),
)
"""Questions and JSON schemas of everyday kinds."""

REGEXES = (
    *("yes|no", "[0-9]+", "[A-Z][a-z]+", "[A-Za-z ]{1,30}", "\\w+", "#[0-9a-f]{6}", "- .{1,20}"),
    *("[0-9]{4}-[0-9]{2}-[0-9]{2}", "The answer is [0-9]+\\.", "(red|green)( and .{1,20})?"),
)
CHOICES = (("yes", "no"), ("A", "B", "C", "D"), ("1", "2", "3"), ("Paris", "London", "Rome"))


def forms() -> Iterator[tuple[str, dict[str, Any]]]:
    """Questions with the options that give the form of their answers."""
    for question, schema in SCHEMAS:
        yield f"{question} Answer in JSON.", {"json_schema": schema, "max_new_tokens": 64}
    others: list[dict[str, Any]] = [{"regex": each} for each in REGEXES]
    others += [{"choices": each} for each in CHOICES]
    for (question, _), form in zip(SCHEMAS, others, strict=False):
        yield question, {**form, "max_new_tokens": 24}


def has_form(text: str, form: dict[str, Any]) -> bool:
    if "json_schema" in form:
        return is_valid(form["json_schema"], text)
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    return text in form["choices"]


@pytest.mark.parametrize("team", TEAMS, ids="+".join)
def test_every_response_has_its_form_and_few_end_at_the_limit(
    real_engine: Any, team: tuple[str, ...]
) -> None:
    check_forms(real_engine(*team), [*forms()][TEAMS.index(team) :: len(TEAMS)])


def check_forms(engine: AdaFuseEngine, forms: list[tuple[str, dict[str, Any]]]) -> None:
    """Ask for forms, with B = 1 and B = 3 in turn. A limit may cut two schemas."""
    cut = 0
    for turn, (question, form) in enumerate(forms):
        messages = [{"role": "user", "content": question}]
        branches = (1, 3)[turn % 2]
        found = engine.generate(messages=messages, branching_factor=branches, **form)
        is_cut = "json_schema" in form and found.finish_reason == "length"
        assert is_cut or has_form(found.text, form), (form, found.text)
        cut += is_cut
    assert cut <= 2
