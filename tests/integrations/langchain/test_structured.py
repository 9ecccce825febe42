"""Replies that fit a schema, in all ways to ask for them and to say the schema."""

from __future__ import annotations

import copy
import json
import re
from typing import Annotated, Any, Literal

import pydantic.v1
import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, StructuredOutputValidationError
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel
from typing_extensions import NotRequired, TypedDict

from adafuse_llm import InvalidInputError
from langchain_adafuse import ChatAdaFuse, get_round_callback
from langchain_adafuse._schema import check_schema, problems
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
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
METHODS = ["json_schema", "function_calling", "json_mode"]


def chat_that(script, **fields):
    """A model that only describes schemas to its members, so that replies may not fit."""
    return ChatAdaFuse(engine=scripted_engine(script), **{"enforce": False, **fields})


def written(value, method, name="City"):
    return call(name, **value) if method == "function_calling" else json.dumps(value)


def plain(value):
    return value if isinstance(value, dict) else value.__dict__


def repairing(method, failures, name="City"):
    """Replies that do not fit until they were corrected so many times."""

    def script(prompt):
        if prompt.count("This reply cannot be used") < failures:
            return written({"name": "Orrin", "people": "many"}, method, name)
        return written(GOOD, method, name)

    return script


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
    chat = chat_that(repairing(method, 0, name))
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
        list(raw.stream("Which?"))[-1],
    ):
        assert set(whole) == {"raw", "parsed", "parsing_error"}
        assert plain(whole["parsed"]) == GOOD
        assert whole["parsing_error"] is None
        assert whole["raw"].usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize(
    ("method", "schema"), [("json_schema", City), ("function_calling", CityDict)]
)
async def test_what_does_not_fit_is_repaired_so_many_times(method, schema):
    name = schema.__name__
    chat = chat_that(repairing(method, 2, name))
    structured = chat.with_structured_output(schema, method=method)
    with get_round_callback() as rounds:
        assert plain(structured.invoke("Which city?")) == GOOD
    assert len({each["run_id"] for each in rounds.rounds}) == 3
    assert plain(list(structured.stream("Which city?"))[-1]) == GOOD
    assert plain([each async for each in structured.astream("Which city?")][-1]) == GOOD

    once = chat.with_structured_output(schema, method=method, max_repairs=1)
    with pytest.raises(OutputParserException, match=r"max_repairs=1.*people"):
        once.invoke("Which city?")
    with pytest.raises(OutputParserException, match="people"):
        list(once.stream("Which city?"))
    raw = chat.with_structured_output(schema, method=method, max_repairs=0, include_raw=True)
    whole = raw.invoke("Which city?")
    assert whole["parsed"] is None
    assert "people" in str(whole["parsing_error"])


@pytest.mark.parametrize("reply", ['[{"a": 1}, {"a": 2}]', 'So: [{"a": 1}, {"a": 2}] {}'])
async def test_a_list_streams_as_a_list_from_the_first(reply):
    schema = {"title": "L", "type": "array", "items": {"type": "object"}}
    structured = chat_that(lambda prompt: reply, max_words=1).with_structured_output(schema)
    for pieces in (
        list(structured.stream("Which?")),
        [piece async for piece in structured.astream("Which?")],
    ):
        assert all(isinstance(piece, list) for piece in pieces)
        assert pieces[-1] == [{"a": 1}, {"a": 2}]
        assert len(pieces) > 2


class Inner(TypedDict):
    """An inner object."""

    number: int | None


class Nullable(TypedDict):
    """Everything that can be null."""

    name: str
    note: str | None
    choice: Literal["a", None]  # noqa: PYI061
    many: list[str | None]
    inner: Inner
    described: Annotated[str | None, ..., "A description."]
    absent: NotRequired[str]


NULLS: dict[str, Any] = {
    "name": "Orrin",
    "note": None,
    "choice": None,
    "many": ["x", None],
    "inner": {"number": None},
    "described": None,
}


@pytest.mark.parametrize("method", METHODS)
def test_null_fits_what_a_typed_dict_calls_optional(method):
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        return written(NULLS, method, "Nullable")

    chat = chat_that(script)
    structured = chat.with_structured_output(Nullable, method=method, max_repairs=0)
    assert structured.invoke("Which?") == NULLS
    assert list(structured.stream("Which?"))[-1] == NULLS
    if method != "json_mode":
        assert any('"null"' in prompt and "A description." in prompt for prompt in prompts)
    wrong = chat_that(lambda prompt: written({**NULLS, "name": None}, method, "Nullable"))
    with pytest.raises(OutputParserException, match="'name'"):
        wrong.with_structured_output(Nullable, method=method, max_repairs=0).invoke("Which?")


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


def replying(reply):
    return chat_that(lambda prompt: reply)


@pytest.mark.parametrize(("kind", "method"), [*zip(WRAPPED, METHODS * 3, strict=False)])
def test_a_schema_in_a_wrapper_is_the_schema(kind, method):
    given = copy.deepcopy(WRAPPED[kind])
    replies = [written({"name": "Orrin"}, method), written(GOOD, method)]
    wrong, right = (
        replying(reply).with_structured_output(given, method=method, max_repairs=0)
        for reply in replies
    )
    assert right.invoke("Which?") == GOOD
    with pytest.raises(OutputParserException, match="'people' is a required"):
        wrong.invoke("Which?")
    assert given == WRAPPED[kind]


@pytest.mark.quick
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"name": "City", "schema": {}},
        {"name": "City", "schema": "City"},
        {"name": "City", "shema": WANTED},
        {"type": "json_schema", "json_schema": WANTED},
        {"type": "json_schema", "json_schema": None},
        {"type": "function", "function": {"name": "City"}},
    ],
    ids=str,
)
def test_a_dict_without_a_schema_is_refused(chat, schema):
    for method in METHODS:
        with pytest.raises(InvalidInputError, match="a schema must be a pydantic class"):
            chat.with_structured_output(schema, method=method)


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
        for found in (raw.invoke("?"), await raw.ainvoke("?"), list(raw.stream("?"))[-1]):
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


@pytest.mark.parametrize(
    ("schema", "fits", "wrong", "place"),
    [
        ({"type": "integer", "minimum": 3}, 3, True, "reply"),
        ({"type": "array", "items": {"type": "integer"}}, [1], [1, "b"], r"reply\[1\]"),
        ({"type": "string", "format": "date"}, "2024-12-31", "2024-13-01", "date"),
        ({"$schema": DRAFT_7, "items": [True, False]}, [1], [1, 2], "reply"),
        (
            {"properties": {"a": {"$ref": "#/$defs/S"}}, "$defs": {"S": {"type": "string"}}},
            {"a": "x"},
            {"a": 1},
            r"reply\['a'\]",
        ),
        ({"type": "integer"}, 1, "x" * 5000, r"^.{1,320}$"),
    ],
)
def test_values_are_validated_by_the_keywords_of_their_draft(schema, fits, wrong, place):
    check_schema(schema)
    assert not problems(fits, schema)
    assert re.search(place, problems(wrong, schema)[0])
