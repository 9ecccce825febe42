"""JSON schemas that are prepared for llguidance: what they refuse, close and leave alone.

`tests.text.test_json_schema_suite` compares documents and random texts with public schemas.
"""

from __future__ import annotations

import datetime as dt
import enum
import json
import random
import re
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from pydantic import AnyUrl, BaseModel, Field, create_model

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseConfig
from adafuse_llm.errors import GrammarError
from adafuse_llm.text import schema as prepared_schemas
from adafuse_llm.text.grammar import Grammar, GrammarText
from adafuse_llm.text.schema import enforceable
from tests.support.schemas import is_valid, walk

pytestmark = pytest.mark.quick

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def start(schema: Any) -> GrammarText:
    grammar = Grammar.of(AdaFuseConfig(json_schema=schema))
    assert grammar is not None
    return grammar.text()


def accepted(schema: Any, *values: Any) -> list[bool]:
    """Whether a schema accepts each value. A refused schema accepts none."""
    try:
        text = start(schema)
    except GrammarError:
        return [False] * len(values)
    return [text.can_end(json.dumps(value, ensure_ascii=False)) for value in values]


# What the compiler alone would accept wrongly


@pytest.mark.parametrize(
    ("schema", "forbidden"),
    [
        ({"const": "a\x00b"}, "ab"),
        ({"enum": [["\x7fa"]]}, ["a"]),
        ({"items": [{"const": 1}], "anyOf": [{}], "additionalItems": False}, [1, 2]),
        ({"items": [{}], "enum": [[1, 2]], "additionalItems": False}, [1, 2]),
        ({"prefixItems": [{"const": 1}], "additionalItems": False}, [2]),
        ({"$schema": DRAFT_7, "prefixItems": [{"const": "a"}], "items": {"const": 1}}, ["a", 1]),
        ({"propertyNames": False}, {"a": 1}),
        ({"propertyNames": {"enum": ["a", "b"]}, "maxProperties": 1}, {"a": 1, "b": 1}),
        ({"propertyNames": {"$ref": "#/a"}, "a": {"minLength": 2}}, {"a": 1}),
        ({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"minLength": 2}}}, {"a": 1}),
        ({"type": "object", "propertyNames": {"enum": ["a\x00"]}}, {"a": 1}),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1),
        ({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}, 1),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1, "b": 1}),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": "null"}]}, None),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, 131074),
        ({"type": "number", "anyOf": [{"multipleOf": 5}]}, 1),
        ({"type": "string", "pattern": "^a++a$"}, "aa"),
        ({"type": "string", "pattern": "^[[:alpha:]]$"}, "q"),
        ({"type": "string", "pattern": "^a\\x00b$"}, "ab"),
        ({"type": "string", "pattern": "^\\S$"}, "\ufeff"),
        ({"type": "string", "pattern": "^.$"}, "\u2028"),
        ({"type": "string", "format": "date"}, "2100-02-29"),
    ],
)
def test_what_a_schema_forbids_is_not_accepted(schema: Any, forbidden: Any) -> None:
    assert accepted(schema, forbidden) == [False]


def test_numbers_within_bounds_are_so_as_floats() -> None:
    chance = random.Random(1)
    checked = 0
    for _ in range(60):
        digits = chance.choice([0, 1, 3, 9])
        bound = round(chance.choice([0.1, 1, 90, 5e5, 3e7, 8e12]) * chance.random(), digits)
        keyword = chance.choice(["exclusiveMaximum", "maximum"])
        try:
            text = start({"type": "number", keyword: bound})
        except GrammarError:  # a bound with too many digits
            continue
        for _ in range(20):
            step = chance.choice([-1, 0, 1]) * Decimal(10) ** chance.randrange(-20, 3)
            near = Decimal(repr(bound)) + step
            written = format(near, "f") + "9" * chance.choice([0, 20]) * (near % 1 != 0)
            if text.can_end(written):
                checked += 1
                assert float(written) < bound or (keyword == "maximum" and float(written) == bound)
    assert checked > 50


def test_every_day_of_some_years_is_a_date_and_nothing_else() -> None:
    text = start({"type": "string", "format": "date"})
    for year in (1900, 1999, 2000, 2004):
        for month, day in ((m, d) for m in range(14) for d in range(33)):
            written = f"{year}-{month:02}-{day:02}"
            try:
                dt.date.fromisoformat(written)
            except ValueError:
                assert not text.can_end(f'"{written}"'), written
            else:
                assert text.can_end(f'"{written}"'), written


# Patterns

ATOMS = (
    *("a", '"', "\\\\", ".", "\\d", "\\D", "\\w", "\\s", "\\S", "[^a]", '[^"]', "[^\\\\]"),
    *("[^\\d]", "[^\\w]", "[^\\s]", "[\\s\\S]", "[\\w1]", "[^ -~]", "[\\w-]", "[^-a]", "\\n"),
    *("[.]", "\\u0061", "[\\]]", "\\/", "#", " ", "[!-\\xff]", "\\.", "[^.]"),
)
CHARACTERS = ("a", "1", '"', "\\", "\n", "\r", "_", " ", "-", "]", ".", "\ufeff", "#", "\u2028")


def random_pattern(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth > 2 or kind < 0.5:
        return rng.choice(ATOMS)
    inner = random_pattern(rng, depth + 1)
    if kind < 0.7:
        return inner + random_pattern(rng, depth + 1)
    if kind < 0.85:
        return f"(?:{inner}|{random_pattern(rng, depth + 1)})"
    return f"({inner}){rng.choice('*+?')}"


def test_patterns_allow_only_what_python_allows() -> None:
    rng = random.Random(2)
    texts = ["", *CHARACTERS, *(x + y for x in CHARACTERS[:3] for y in CHARACTERS)]
    found = {True: 0, False: 0}
    for _ in range(40):
        pattern = f"^(?:{random_pattern(rng)})$"
        for text, is_accepted in zip(texts, accepted({"pattern": pattern}, *texts), strict=True):
            found[is_accepted] += 1
            assert not is_accepted or re.search(pattern, text), (pattern, text)
    assert min(found.values()) > 200


def test_the_decimals_of_pydantic_need_no_lookahead() -> None:
    schema = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    assert accepted(schema, "1.5", "-.5", "007", "+1.") == [True] * 4
    assert accepted(schema, "", "-", "+.", "1e5") == [False] * 4


# Refusals


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"age": {"minimum": 2**60}}}, "properties.age.minimum"),
        ({"anyOf": [{}, {"not": {}}]}, "anyOf.1.not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$defs": {"a": {"unevaluatedProperties": False}}}, "$defs.a.unevaluatedProperties"),
        ({"propertyNames": {"minLength": 1}}, "propertyNames"),
        ({"minProperties": 2}, "minProperties"),
        ({"$ref": "https://example.com/a"}, "$ref"),
        ({"$ref": "#/odd/place", "odd": {"place": {}}}, "$ref"),
        ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "$ref"),
        ({"items": {"$id": "https://example.com/a"}}, "items.$id"),
        ({"items": {"divisibleBy": 3}}, "items.divisibleBy"),
        ({"multipleOf": 0.01}, "multipleOf"),
        ({"exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"minimum": float("inf")}, "minimum"),
        ({"type": "string", "format": "idn-email"}, "format"),
        ({"required": True}, "required"),
        ({"pattern": "(?=a)b"}, "pattern"),
        ({"pattern": "\\p{L}"}, "pattern"),
        ({"const": 0.12345678901234567}, "const"),
        ({"enum": [{"a": ["\x01"]}]}, "enum"),
        ({"oneOf": [{}, {}]}, "oneOf"),
    ],
)
def test_a_refusal_names_the_keyword_and_its_place(schema: Any, place: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(f"'{place}' ")):
        enforceable(schema)


def test_a_schema_must_be_an_object() -> None:
    with pytest.raises(GrammarError, match="must be an object"):
        enforceable([])  # type: ignore[arg-type]


def test_a_deep_schema_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="nested too deeply"):
        enforceable(deep)


ANNOTATIONS = {
    *("$schema", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
}


@pytest.mark.parametrize("draft", ["draft-06", "draft-07", "draft/2019-09", "draft/2020-12"])
def test_every_keyword_of_a_draft_is_enforced_refused_or_an_annotation(draft: str) -> None:
    registry = pytest.importorskip("jsonschema_specifications").REGISTRY
    parts = [registry.contents(uri) for uri in registry if draft in uri]
    found = {keyword for part in parts for keyword in part.get("properties", {})}
    names = ("_KEPT", "_MAPS", "_SCHEMAS", "_NUMBERS", "_CLASSES", "_REFUSED")
    known = {keyword for name in names for keyword in getattr(prepared_schemas, name)}
    assert len(found) > 30
    assert found <= known | ANNOTATIONS


def test_the_given_schema_is_not_changed() -> None:
    schema = {"propertyNames": {"enum": ["a"]}, "items": {"format": "date", "minimum": 1}}
    before = json.dumps(schema)
    enforceable(schema)
    assert json.dumps(schema) == before


# What pydantic and zod write


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(gt=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: bool = False


class Node(BaseModel):
    value: int
    children: list[Node] = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
TYPES = (
    *(str, int, float, bool, None, str | None, dt.datetime, dt.date, dt.time, dt.timedelta),
    *(uuid.UUID, AnyUrl, Decimal, Color, Level, Literal["x", 1, True], Node, list[Pet | None]),
    *(Annotated[str, Field(min_length=2, max_length=5)], Annotated[int, Field(multiple_of=5)]),
    *(Annotated[str, Field(pattern=r"^[a-z]+-\d{2}$")], Annotated[int, Field(gt=0, lt=10)]),
    *(Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(gt=-12345678.5, lt=1e10)]),
    *(Annotated[list[int], Field(min_length=1, max_length=3)], tuple[int, str], tuple[int, ...]),
    *(dict[str, Level], dict[str, Any], dict[Literal["x", "y"], int], dict[Literal["x"], int]),
    *(dict[Color, int], Annotated[dict[str, int], Field(min_length=1, max_length=3)], Cat | Dog),
)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_random_documents_of_pydantic_models_are_valid(kind: Any) -> None:
    model = create_model("Model", value=(kind, ...))
    schema = model.model_json_schema()
    text = start(schema)
    found = [each for each in (walk(text, seed, 300) for seed in range(20)) if each is not None]
    assert found
    for each in found:
        assert is_valid(schema, each)
        if kind is not Decimal:  # the schema of a decimal allows texts that are none
            model.model_validate_json(each)


def _object(**properties: Any) -> dict[str, Any]:
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


NULL = {"type": "null"}
A_OR_B = {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a"]}
ZOD: list[tuple[dict[str, Any], Any, Any]] = [
    ({"$ref": "#/definitions/A", "definitions": {"A": {"multipleOf": 5}}}, 10, 11),
    (_object(a=NULL, b={"$ref": "#/properties/a"}), {"a": None, "b": None}, {"a": None}),
    (_object(name={}, sub={"items": {"$ref": "#"}}), {"name": 1, "sub": []}, {"name": 1}),
    ({"type": "array", "items": [{"type": "string"}, {}], "minItems": 2}, ["a", 1], [1, 1]),
    ({"allOf": [_object(), {"type": "object"}]}, {}, 1),
    ({"oneOf": [_object(k={"const": "a"}), _object(k={"const": "b"})]}, {"k": "b"}, {"k": "c"}),
    (
        {
            "oneOf": [
                _object(k={"const": "a"}),
                {
                    "oneOf": [
                        _object(k={"const": "b"}, n={"const": 1}),
                        _object(k={"const": "b"}, n={"const": 2}),
                    ]
                },
            ]
        },
        {"k": "b", "n": 2},
        {"k": "b", "n": 3},
    ),
    ({"type": "object", "propertyNames": {"type": "string"}}, {"any": 1}, 1),
    ({**A_OR_B, "additionalProperties": NULL}, {"a": None, "b": None}, {"a": 1}),
    (A_OR_B, {"a": 1, "b": 2}, {"a": 1, "c": 2}),
    ({"type": "string", "pattern": "^x\\-y\\_\\/\\ z"}, "x-y_/ z!", "x-y_/z"),
    ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "a-b", "a-"),
    ({"type": ["string", "number"]}, 1.5, None),
    ({"type": "integer", "format": "int64"}, 3, 2**60),
]


@pytest.mark.parametrize("draft", [{}, {"$schema": DRAFT_7}])
@pytest.mark.parametrize(("schema", "right", "wrong"), ZOD)
def test_schemas_of_zod_are_enforced(schema: Any, right: Any, wrong: Any, draft: Any) -> None:
    assert accepted({**draft, **schema}, right, wrong) == [True, False]
