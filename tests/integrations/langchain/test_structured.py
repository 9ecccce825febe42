"""Replies that fit a schema, in all ways to ask for them and to say the schema."""

from __future__ import annotations

import copy
import json
from functools import reduce
from operator import add
from typing import Any

import pydantic.v1
import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, StructuredOutputValidationError
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel, ValidationError
from typing_extensions import TypedDict

from langchain_adafuse import ChatAdaFuse
from tests.support.instruction_follower import call
from tests.support.scripted import scripted_engine

GOOD: dict[str, Any] = {"name": "Orrin", "people": 1200}


class City(BaseModel):
    """A city."""

    name: str
    people: int


class CityV1(pydantic.v1.BaseModel):
    """A city."""

    name: str
    people: int


class CityDict(TypedDict):
    """A city."""

    name: str
    people: int


SCHEMAS: dict[str, Any] = {
    "v2": City,
    "v1": CityV1,
    "typed dict": CityDict,
    "json schema": City.model_json_schema(),
    "openai": {"name": "City", "description": "A city.", "parameters": City.model_json_schema()},
}
METHODS = ["json_schema", "function_calling", "json_mode"]


def chat_that(script, **fields):
    """A model that only describes schemas to its members, so that replies may not fit."""
    return ChatAdaFuse(engine=scripted_engine(script), **{"enforce": False, **fields})


def written(value, method, name="City"):
    return call(name, **value) if method == "function_calling" else json.dumps(value)


def plain(value):
    return value if isinstance(value, dict) else value.__dict__


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("json_schema", "v2"),
        ("json_schema", "typed dict"),
        ("function_calling", "v1"),
        ("function_calling", "json schema"),
        ("json_mode", "openai"),
    ],
)
async def test_methods_and_schemas(method, kind):
    schema = SCHEMAS[kind]
    name = getattr(schema, "__name__", "City")
    chat = chat_that(lambda _: written(GOOD, method, name))
    structured = chat.with_structured_output(schema, method=method)
    expected = type(structured.invoke("Which city?"))
    assert expected is (schema if kind in ("v1", "v2") else dict)
    assert plain(structured.invoke("Which city?")) == GOOD
    assert plain(await structured.ainvoke("Which city?")) == GOOD
    pieces = list(structured.stream("Which city?"))
    assert plain(pieces[-1]) == GOOD
    assert plain([piece async for piece in structured.astream("Which city?")][-1]) == GOOD
    if method != "function_calling" and expected is dict:
        assert len(pieces) > 1
        assert set(pieces[0]) < set(GOOD) or pieces[0] != GOOD
    assert [plain(each) for each in structured.batch(["A?", "B?"])] == [GOOD, GOOD]

    raw = chat.with_structured_output(schema, method=method, include_raw=True)
    for whole in (
        raw.invoke("Which?"),
        await raw.ainvoke("Which?"),
        reduce(add, raw.stream("Which?")),
    ):
        assert set(whole) == {"raw", "parsed", "parsing_error"}
        assert plain(whole["parsed"]) == GOOD
        assert whole["parsing_error"] is None
        assert whole["raw"].usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("reply", [{"name": "Orrin", "people": "many"}, None])
async def test_what_does_not_fit_is_an_error_of_the_parser(method, reply):
    text = "I do not know." if reply is None else written(reply, method)
    chat = chat_that(lambda _: text)
    structured = chat.with_structured_output(City, method=method)
    with pytest.raises((OutputParserException, ValidationError)):
        structured.invoke("Which city?")
    with pytest.raises((OutputParserException, ValidationError)):
        await structured.ainvoke("Which city?")
    raw = chat.with_structured_output(City, method=method, include_raw=True)
    whole = raw.invoke("Which city?")
    assert whole["parsed"] is None
    assert whole["parsing_error"] is not None


WANTED = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
}
WRAPPED: dict[str, Any] = {
    "inner": {"name": "City", "schema": WANTED},
    "chat completions": {
        "type": "json_schema",
        "json_schema": {"name": "City", "description": "A city.", "schema": WANTED},
    },
    "responses": {"type": "json_schema", "name": "City", "schema": WANTED},
    "tool": {"type": "function", "function": {"name": "City", "parameters": WANTED}},
    "anthropic": {"name": "City", "input_schema": WANTED},
}


@pytest.mark.parametrize(("kind", "method"), [*zip(WRAPPED, METHODS * 3, strict=False)])
def test_a_schema_in_a_wrapper_is_the_schema(kind, method):
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        return written(GOOD, method)

    given = copy.deepcopy(WRAPPED[kind])
    structured = chat_that(script).with_structured_output(given, method=method)
    assert structured.invoke("Which?") == GOOD
    assert method == "json_mode" or any("people" in prompt for prompt in prompts)
    assert given == WRAPPED[kind]


class Pair(BaseModel):
    a: str
    b: str


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_an_object_that_the_limit_cuts_is_an_error(method):
    value = {"a": "x", "b": "mill " * 40}
    reply = json.dumps(value) if method == "json_schema" else call("Pair", **value)
    with scripted_engine(lambda _: reply) as engine:
        chat: Any = ChatAdaFuse(engine=engine, max_tokens=130)
        raw = chat.with_structured_output(Pair, method=method, include_raw=True)
        for found in (raw.invoke("?"), await raw.ainvoke("?")):
            assert found["parsed"] is None
            assert "max_tokens" in str(found["parsing_error"])
            assert method != "json_schema" or json.loads(found["raw"].text)["a"] == "x"
        plain = chat.with_structured_output(Pair, method=method)
        with pytest.raises(OutputParserException, match="max_tokens"):
            plain.invoke("?")
        with pytest.raises(OutputParserException, match="max_tokens"):
            [each async for each in plain.astream("?")]
        agent: Any = create_agent(chat, [], response_format=ProviderStrategy(Pair))
        if method == "json_schema":
            with pytest.raises(StructuredOutputValidationError):
                agent.invoke({"messages": [("user", "?")]})


def test_a_number_that_the_limit_may_have_cut_is_an_error():
    with scripted_engine(lambda _: "123456789") as engine:
        chat = ChatAdaFuse(engine=engine, max_tokens=4)
        found = chat.with_structured_output({"title": "N", "type": "integer"}, include_raw=True)
        assert "max_tokens" in str(found.invoke("?")["parsing_error"])
