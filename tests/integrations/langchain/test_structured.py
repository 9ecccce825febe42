"""Replies that fit a schema, in all ways to ask for them and to write the schema."""

from __future__ import annotations

import json
import re
import sys
from functools import reduce
from operator import add
from typing import Any

import pydantic.v1
import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import (
    ProviderStrategy,
    StructuredOutputValidationError,
    ToolStrategy,
)
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from adafuse_llm import GrammarError, MissingDependencyError
from langchain_adafuse import ChatAdaFuse
from tests.support.instruction_follower import call
from tests.support.scripted import scripted_engine

GOOD: dict[str, Any] = {"name": "Orrin", "people": 1200}
UNFIT: dict[str, Any] = {"name": "Orrin", "people": "many"}
METHODS: list[Any] = ["json_schema", "function_calling"]


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


WANTED = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
}
SCHEMAS: dict[str, Any] = {
    "v2": City,
    "v1": CityV1,
    "typed dict": CityDict,
    "json schema": City.model_json_schema(),
    "function": {"name": "City", "description": "A city.", "parameters": WANTED},
    "named": {"name": "City", "schema": WANTED},
    "chat completions": {"type": "json_schema", "json_schema": {"name": "City", "schema": WANTED}},
    "responses": {"type": "json_schema", "name": "City", "schema": WANTED},
}


def chat_that(script, **fields):
    """A model that only describes schemas to its members, so that replies may not fit."""
    script = script if callable(script) else lambda prompt, reply=script: reply
    return ChatAdaFuse(engine=scripted_engine(script), **{"enforce": False, **fields})


def written(value, method, name="City"):
    return call(name, **value) if method == "function_calling" else json.dumps(value)


def plain(value):
    return value if isinstance(value, dict) else value.__dict__


@pytest.mark.parametrize(
    ("method", "kind"),
    [("json_schema", "typed dict"), ("function_calling", "v1"), ("json_mode", "function")],
)
async def test_methods_give_the_object_in_all_ways(method, kind):
    schema = SCHEMAS[kind]
    chat = chat_that(written(GOOD, method, getattr(schema, "__name__", "City")))
    structured = chat.with_structured_output(schema, method=method)
    assert type(structured.invoke("?")) is (schema if kind == "v1" else dict)
    pieces = list(structured.stream("?"))
    raw = chat.with_structured_output(schema, method=method, include_raw=True)
    whole: Any = reduce(add, raw.stream("?"))
    for found in (
        await structured.ainvoke("?"),
        pieces[-1],
        [piece async for piece in structured.astream("?")][-1],
        raw.invoke("?")["parsed"],
        whole["parsed"],
    ):
        assert plain(found) == GOOD
    assert whole["parsing_error"] is None
    assert (len(pieces) > 1) == (method != "function_calling")


@pytest.mark.parametrize("kind", [*SCHEMAS])
def test_every_form_of_a_schema_reaches_the_members(kind):
    prompts = []
    chat = chat_that(lambda prompt: prompts.append(prompt) or json.dumps(GOOD))
    assert plain(chat.with_structured_output(SCHEMAS[kind]).invoke("Which?")) == GOOD
    assert any("people" in prompt for prompt in prompts)


@pytest.mark.parametrize("method", METHODS)
async def test_what_does_not_fit_is_an_error_of_the_parser(method):
    chat = chat_that(lambda p: "I do not know." if "Where" in p else written(UNFIT, method))
    structured = chat.with_structured_output(City, method=method)
    for question in ("Which city?", "Where?"):
        with pytest.raises(ValueError):
            await structured.ainvoke(question)
    whole = chat.with_structured_output(City, method=method, include_raw=True).invoke("?")
    assert whole["parsed"] is None
    assert whole["parsing_error"] is not None


class Pair(BaseModel):
    a: str
    b: str


@pytest.mark.parametrize("method", METHODS)
async def test_an_object_that_the_limit_cuts_is_an_error(method):
    reply = written({"a": "x", "b": "mill " * 40}, method, "Pair")
    chat: Any = chat_that(reply, max_tokens=130, enforce="auto")
    found = chat.with_structured_output(Pair, method=method, include_raw=True).invoke("?")
    assert found["parsed"] is None
    assert "max_tokens" in str(found["parsing_error"])
    assert method != "json_schema" or json.loads(found["raw"].text)["a"] == "x"
    with pytest.raises(OutputParserException, match="max_tokens"):
        [each async for each in chat.with_structured_output(Pair, method=method).astream("?")]
    if method == "json_schema":
        agent: Any = create_agent(chat, [], response_format=ProviderStrategy(Pair))
        with pytest.raises(StructuredOutputValidationError):
            agent.invoke({"messages": [("user", "?")]})


# Enforced -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_enforced_reply_fits_whatever_the_members_write(method):
    pytest.importorskip("llguidance")
    chat = chat_that(written(UNFIT, method), enforce=True, max_new_tokens=80)
    assert chat.with_structured_output(City, method=method).invoke("Which?").name == "Orrin"


@tool
def population(city: str) -> int:
    """How many people live in a city."""
    return {"Orrin": 1200}[city]


def asks_first(prompt):
    if '"content": "1200"' not in prompt:
        return call("population", city="Orrin")
    return call("City", **GOOD) if '"name": "City"' in prompt else json.dumps(GOOD)


@pytest.mark.parametrize("strategy", [ProviderStrategy(City), ToolStrategy(City)])
def test_agents_call_tools_and_answer_in_a_schema(strategy):
    chat = chat_that(asks_first, enforce="auto")
    agent = create_agent(chat, [population], response_format=strategy)
    state = agent.invoke({"messages": [HumanMessage("Which city?")]})
    assert state["structured_response"] == City(**GOOD)
    results = [each.content for each in state["messages"] if isinstance(each, ToolMessage)]
    assert results[0] == "1200"


class Odd(BaseModel):
    """A schema with a pattern that cannot be enforced."""

    name: str = Field(json_schema_extra={"pattern": "(?=O)"})


def test_a_schema_that_cannot_be_enforced_is_described_with_one_warning(caplog):
    pytest.importorskip("llguidance")
    chat = chat_that('{"name": "Orrin"}', enforce="auto")
    structured = chat.with_structured_output(Odd)
    assert structured.invoke("Which?") == structured.invoke("Which?") == Odd(name="Orrin")
    (record,) = caplog.records
    assert re.search("not enforced.*look-?ahead", record.message)
    with pytest.raises(GrammarError, match=r"look-?ahead"):
        chat.with_structured_output(Odd, enforce=True).invoke("Which?")


def test_without_the_extra_nothing_is_enforced(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    chat = chat_that(call("population", town=3), enforce="auto")
    assert not chat.profile["structured_output"]
    assert chat.bind_tools([population]).invoke("Go").tool_calls[0]["args"] == {"town": 3}
    assert "enforced" not in caplog.text
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[grammar\]"):
        chat.bind_tools([population], enforce=True).invoke("Go")
