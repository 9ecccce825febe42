"""Replies that fit a schema, in all ways to ask for them and to say the schema."""

from __future__ import annotations

import copy
import json
import re
from typing import Annotated, Any, Literal

import pydantic.v1
import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel
from typing_extensions import NotRequired, TypedDict

from adafuse_llm import InvalidInputError, InvalidOptionError
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


@pytest.mark.sweep(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", SCHEMAS)
async def test_all_methods_and_schemas(method, kind):
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


@pytest.mark.sweep(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", [City, CityDict])
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


@pytest.mark.quick
def test_in_a_chain_and_with_options():
    chat = chat_that(lambda prompt: f"Sure:\n```json\n{json.dumps(GOOD)}\n```")
    prompt = ChatPromptTemplate.from_messages([("system", "Be exact."), ("user", "{question}")])
    chain = prompt | chat.with_structured_output(City)
    assert chain.invoke({"question": "Which?"}) == City(**GOOD)
    assert list(chain.stream({"question": "Which?"}))[-1] == City(**GOOD)
    with pytest.raises(OutputParserException, match="cut off"):
        chat.with_structured_output(City, max_repairs=0).invoke("Which?", max_tokens=24)


@pytest.mark.quick
def test_a_call_that_is_missing_is_said():
    chat = chat_that(lambda prompt: "Orrin.")
    structured = chat.with_structured_output(City, method="function_calling", max_repairs=0)
    with pytest.raises(OutputParserException, match="no call of the tool City"):
        structured.invoke("Which?")


def test_c2_the_correction_asks_for_what_is_accepted():
    requests = []

    def script(prompt):
        if "This reply cannot be used" not in prompt:
            return call("City", name="Orrin", people="many")
        requests.append(prompt)
        asked = prompt.rpartition("This reply cannot be used")[2]
        return call("City", **GOOD) if "a corrected call of the tool City" in asked else "{}"

    structured = chat_that(script).with_structured_output(City, method="function_calling")
    assert structured.invoke("Which city?") == City(**GOOD)
    assert not any("JSON value" in prompt.rpartition("cannot be used")[2] for prompt in requests)
    assert structured.invoke("Which city?") == City(**GOOD)

    truncated = call("City", **GOOD)[:-20]
    raw = chat_that(lambda prompt: truncated).with_structured_output(
        City, method="function_calling", max_repairs=0, include_raw=True
    )
    assert "not closed by </tool_call>" in str(raw.invoke("Which city?")["parsing_error"])


@pytest.mark.parametrize("reply", ['[{"a": 1}, {"a": 2}]', 'So: [{"a": 1}, {"a": 2}] {}'])
async def test_c9_a_list_streams_as_a_list_from_the_first(reply):
    schema = {"title": "L", "type": "array", "items": {"type": "object"}}
    structured = chat_that(lambda prompt: reply, max_words=1).with_structured_output(schema)
    for pieces in (
        list(structured.stream("Which?")),
        [piece async for piece in structured.astream("Which?")],
    ):
        assert all(isinstance(piece, list) for piece in pieces)
        assert pieces[-1] == [{"a": 1}, {"a": 2}]
        assert len(pieces) > 2


def test_c9_an_object_after_a_list_streams_as_an_object():
    structured = chat_that(lambda prompt: f"[1, 2]: {json.dumps(GOOD)}", max_words=1)
    pieces = list(structured.with_structured_output(City.model_json_schema()).stream("Which?"))
    assert all(isinstance(piece, dict) for piece in pieces)
    assert pieces[-1] == GOOD


def test_unknown_methods_are_refused(chat):
    with pytest.raises(ValueError, match="method must be one of json_schema"):
        chat.with_structured_output(City, method="grammar")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("value", "schema", "wrong"),
    [
        (3, {"type": "integer", "minimum": 3}, None),
        (2, {"type": "integer", "minimum": 3}, "less than the minimum"),
        (True, {"type": "integer"}, "of type 'integer'"),
        (2.0, {"type": "integer"}, None),
        ("a", {"enum": ["a", "b"]}, None),
        ("c", {"enum": ["a", "b"]}, "one of"),
        (None, {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        (
            3,
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "given.*of type 'string'",
        ),
        ([1, "b"], {"type": "array", "items": {"type": "integer"}}, r"reply\[1\]"),
        ([1], {"type": "array", "minItems": 2}, "too short"),
        ("ab", {"type": "string", "maxLength": 1}, "too long"),
        ("ab", {"type": "string", "pattern": "^b"}, "does not match"),
        ({}, {"type": "object", "required": ["a"]}, "'a' is a required"),
        ({"b": 1}, {"properties": {"a": {}}, "additionalProperties": False}, "'b' was unexpected"),
        (
            {"a": 1},
            {"properties": {"a": {"$ref": "#/$defs/S"}}, "$defs": {"S": {"type": "string"}}},
            r"reply\['a'\]: 1 is not of type 'string'",
        ),
        (
            {"next": {"next": 1}},
            {
                "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                "type": "object",
            },
            "not valid under any",
        ),
        (
            {"next": None},
            {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
            None,
        ),
        ("x" * 5000, {"type": "integer"}, r"^.{1,320}$"),
    ],
)
def test_problems_of_values(value, schema, wrong):
    found = problems(value, schema)
    if wrong is None:
        assert not found
    else:
        assert re.search(wrong, found[0])


@pytest.mark.parametrize("reference", ["#/$defs/S", "https://example.org/s.json", "#/type/x"])
def test_a_schema_that_refers_to_what_it_does_not_hold_is_refused(chat, reference):
    schema = {"title": "City", "type": "object", "properties": {"a": {"$ref": reference}}}
    with pytest.raises(InvalidInputError, match=f"refers to '{re.escape(reference)}'"):
        chat.with_structured_output(schema)
    if reference != "#/type/x":
        with pytest.raises(InvalidInputError, match=f"refers to '{re.escape(reference)}'"):
            problems({"a": 1}, schema)


def test_a_schema_that_refers_to_itself_without_end_is_refused():
    with pytest.raises(InvalidInputError, match="refers to itself"):
        problems(1, {"$ref": "#"})


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, ["a"], ["a", 1]),
        ({"type": "integer", "multipleOf": 3}, 6, 7),
        ({"type": "array", "uniqueItems": True}, [1, 2], [1, 1]),
        ({"type": "string", "not": {"const": "x"}}, "y", "x"),
        ({"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 5}}, 10, 6),
        ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
        ({"type": "string", "format": "date"}, "2024-12-31", "2024-13-01"),
        ({"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 3}]}, 4, 3),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [True, False]},
            [1],
            [1, 2],
        ),
    ],
)
def test_c8_values_are_validated_by_all_keywords(schema, fits, does_not):
    check_schema(schema)
    assert not problems(fits, schema)
    assert problems(does_not, schema)


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"pattern": r"\p{L}", "type": "string"}, r"schema\['pattern'\].*cannot read .*p\{L\}"),
        ({"properties": {"a": {"minimum": "x"}}}, r"schema\['properties'\]\['a'\]\['minimum'\]"),
        ({"type": "number or string"}, r"schema\['type'\]"),
    ],
)
def test_c8_an_invalid_schema_is_one_error_before_any_call(chat, schema, wrong):
    with pytest.raises(InvalidInputError, match=wrong):
        chat.with_structured_output({"title": "City", **schema})


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
def test_c3_null_fits_what_a_typed_dict_calls_optional(method):
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


def test_json_mode_needs_no_schema():
    chat = chat_that(lambda _: '{"a": [1]}')
    assert chat.with_structured_output(method="json_mode").invoke("JSON, please") == {"a": [1]}
    assert chat.with_structured_output(None, method="json_mode").invoke("JSON") == {"a": [1]}
    with pytest.raises(InvalidInputError, match="'json_schema' needs a schema; got None"):
        chat.with_structured_output(None)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"name": None}, r"\['name'\]"),
        ({"note": 3}, r"\['note'\]"),
        ({"choice": "b"}, r"\['choice'\]"),
        ({"many": [3]}, r"\['many'\]\[0\]"),
        ({"inner": {}}, "'number' is a required"),
    ],
)
def test_c3_null_fits_nowhere_else(changed, wrong):
    chat = chat_that(lambda prompt: json.dumps({**NULLS, **changed}))
    with pytest.raises(OutputParserException, match=wrong):
        chat.with_structured_output(Nullable, max_repairs=0).invoke("Which?")


class Endless(TypedDict):
    inner: Endless | None


def test_c3_a_typed_dict_that_contains_itself_is_refused(chat):
    with pytest.raises(InvalidInputError, match="TypedDict Endless contains itself"):
        chat.with_structured_output(Endless)


WANTED = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
}
WRAPPED: dict[str, Any] = {
    "inner": {"name": "City", "schema": WANTED},
    "strict": {"name": "City", "schema": {**WANTED, "title": "Town"}, "strict": True},
    "chat completions": {
        "type": "json_schema",
        "json_schema": {"name": "City", "description": "A city.", "schema": WANTED},
    },
    "responses": {"type": "json_schema", "name": "City", "schema": WANTED},
    "tool": {"type": "function", "function": {"name": "City", "parameters": WANTED}},
    "tool of responses": {"type": "function", "name": "City", "parameters": WANTED},
    "anthropic": {"name": "City", "input_schema": WANTED},
    "named": {"name": "City", **WANTED},
}


def replying(reply):
    return chat_that(lambda prompt: reply)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", WRAPPED)
def test_c4_a_schema_in_a_wrapper_is_the_schema(method, kind):
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


def test_c4_a_schema_of_a_list_is_kept():
    schema = {"title": "Cities", "type": "array", "items": {"type": "string"}}
    for given in (schema, {"name": "Cities", "schema": schema}):
        for reply, fits in (('["Orrin"]', True), ("[3]", False)):
            chat = replying(reply)
            structured = chat.with_structured_output(given, max_repairs=0, include_raw=True)
            assert (structured.invoke("Which?")["parsing_error"] is None) == fits
        with pytest.raises(InvalidInputError, match="needs a schema of an object"):
            chat.with_structured_output(given, method="function_calling")


@pytest.mark.quick
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"title": "City"},
        {"name": "City"},
        {"name": "City", "schema": {}},
        {"name": "City", "schema": "City"},
        {"name": "City", "shema": WANTED},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "City"}},
        {"type": "json_schema", "json_schema": WANTED},
        {"type": "json_schema", "json_schema": None},
        {"type": "function", "function": {"name": "City"}},
    ],
    ids=str,
)
def test_c4_a_dict_without_a_schema_is_refused(chat, schema):
    for method in METHODS:
        with pytest.raises(InvalidInputError, match="a schema must be a pydantic class"):
            chat.with_structured_output(schema, method=method)


@pytest.mark.quick
@pytest.mark.parametrize("repairs", [-1, "x", 1.5, True])
def test_a_wrong_number_of_repairs_is_refused(repairs):
    chat = chat_that(lambda prompt: "Orrin.")
    with pytest.raises(InvalidOptionError, match="max_repairs"):
        chat.with_structured_output(City, max_repairs=repairs)
