"""Replies that fit a schema, in all ways to ask for them and to write the schema."""

import json
import sys
from datetime import date
from functools import reduce
from operator import add
from typing import Any

import pydantic.v1
import pytest
from jsonschema import ValidationError, validate
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

from adafuse_llm import InvalidInputError, InvalidOptionError, MissingDependencyError
from tests.integrations.langchain.test_tools import chat_that, population
from tests.support.instruction_follower import call

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
FUNCTION = {"name": "City", "description": "A city.", "parameters": WANTED}
NAMED = {"name": "City", "schema": WANTED}


def written(value, method, name="City"):
    return call(name, **value) if method == "function_calling" else json.dumps(value)


def plain(value):
    return value if isinstance(value, dict) else value.__dict__


@pytest.mark.parametrize(
    ("method", "schema"),
    [("json_schema", CityDict), ("function_calling", CityV1), ("json_mode", FUNCTION)],
)
async def test_methods_give_the_object_in_all_ways(method, schema):
    chat = chat_that(written(GOOD, method, getattr(schema, "__name__", "City")))
    structured = chat.with_structured_output(schema, method=method)
    assert type(structured.invoke("?")) is (CityV1 if schema is CityV1 else dict)
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


@pytest.mark.parametrize(
    "schema",
    [
        *(City, CityV1, CityDict, City.model_json_schema(), FUNCTION, NAMED),
        {"type": "json_schema", "json_schema": NAMED},
        {"type": "json_schema", **NAMED},
    ],
)
def test_every_form_of_a_schema_reaches_the_members(schema):
    prompts = []
    chat = chat_that(lambda prompt: prompts.append(prompt) or json.dumps(GOOD))
    assert plain(chat.with_structured_output(schema).invoke("Which?")) == GOOD
    assert any("people" in prompt for prompt in prompts)


CITY: dict[str, Any] = {"$ref": "#/$defs/City", "$defs": {"City": WANTED}}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "array", "items": {"const": 3}, "minItems": 1, "maxItems": 1}, [3]),
        ({"title": "Word", "enum": ["mill"]}, "mill"),
        ({"type": ["object", "null"], "properties": {}}, {}),
        ({"title": "City", "description": "A city.", **CITY}, {"name": "", "people": 5}),
        ({"name": "City", "schema": CITY}, {"name": "", "people": 5}),
    ],
)
def test_a_schema_without_properties_is_enforced(schema, found):
    chat = chat_that('{"name": "", "people": 5}', enforce=True, max_new_tokens=80)
    assert chat.with_structured_output(schema).invoke("?") == found
    if found in ([3], "mill"):
        with pytest.raises(InvalidInputError, match="json_schema"):
            chat.with_structured_output(schema, method="function_calling")


class Region(BaseModel):
    cities: list[City]
    regions: list["Region"]


REGION: dict[str, Any] = {"cities": [], "regions": [{"cities": [GOOD], "regions": []}]}


@tool
def census(region: Region) -> str:
    """Count."""
    return str(region)


def test_tools_keep_schemas_without_properties_and_recursive_ones():
    for tool_, name, arguments in (
        ({"title": "City", **CITY}, "City", GOOD),
        (Region, "Region", REGION),
        (census, "census", {"region": REGION}),
    ):
        chat = chat_that(call(name, wrong=3), enforce=True, max_new_tokens=200)
        bound = chat.bind_tools([tool_], tool_choice=name)
        (given,) = bound.kwargs["tools"]
        validate(arguments, given["function"]["parameters"])
        assert set(bound.invoke("?").tool_calls[0]["args"]) == set(arguments)
        with pytest.raises(ValidationError):
            validate(
                json.loads(json.dumps(arguments).replace("1200", '"many"')),
                given["function"]["parameters"],
            )
    chat = chat_that(json.dumps(REGION), enforce=True, max_new_tokens=200)
    assert chat.with_structured_output(Region).invoke("?") == Region(**REGION)


class Founded(BaseModel, strict=True):
    on: date


@pytest.mark.parametrize("method", METHODS)
def test_a_strict_class_takes_what_json_has_no_type_for(method):
    chat = chat_that(written({"on": "1848-05-01"}, method, "Founded"))
    found = chat.with_structured_output(Founded, method=method).invoke("When?")
    assert found == Founded(on=date(1848, 5, 1))


@pytest.mark.parametrize("method", METHODS)
async def test_what_does_not_fit_is_an_error_of_the_parser(method):
    chat = chat_that(lambda p: "I do not know." if "Where" in p else written(UNFIT, method))
    structured = chat.with_structured_output(City, method=method)
    for question in ("Which city?", "Where?"):
        with pytest.raises(ValueError):
            await structured.ainvoke(question)
    whole = chat.with_structured_output(City, method=method, include_raw=True)
    found = whole.invoke("?")
    assert found["parsed"] is None
    assert found["parsing_error"] is not None
    with pytest.raises(InvalidOptionError, match="max_tokens"):
        whole.invoke("?", max_tokns=5)


@pytest.mark.parametrize("method", METHODS)
async def test_an_object_that_the_limit_cuts_is_an_error(method):
    reply = written({**GOOD, "name": "mill " * 40}, method)
    chat: Any = chat_that(reply, max_tokens=120, enforce="auto")
    structured = chat.with_structured_output(City, method=method)
    with pytest.raises(OutputParserException, match="max_tokens"):
        await anext(structured.astream("?"))
    found = chat.with_structured_output(City, method=method, include_raw=True).invoke("?")
    assert "max_tokens" in str(found["parsing_error"])
    assert reply.startswith(found["raw"].text)  # nothing that the engine added
    if method == "json_schema":
        agent: Any = create_agent(chat, [], response_format=ProviderStrategy(City))
        with pytest.raises(StructuredOutputValidationError):
            agent.invoke({"messages": [("user", "?")]})


# Enforced -------------------------------------------------------------------------------------


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
    chat = chat_that('{"name": "Orrin"}', enforce="auto")
    structured = chat.with_structured_output(Odd, include_raw=True)
    first, second = structured.invoke("Which?"), structured.invoke("Which?")
    assert first["parsed"] == second["parsed"] == Odd(name="Orrin")
    (warning,) = caplog.messages
    assert "not enforced" in warning
    assert second["raw"].response_metadata["adafuse_warnings"] == [warning]


def test_without_the_extra_nothing_is_enforced(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    chat = chat_that(call("population", town=3), enforce="auto")
    assert not chat.profile["structured_output"]
    assert chat.bind_tools([population]).invoke("Go").tool_calls[0]["args"] == {"town": 3}
    assert "enforced" not in caplog.text
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[grammar\]"):
        chat.bind_tools([population], enforce=True).invoke("Go")
