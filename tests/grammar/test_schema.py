"""JSON schemas that are prepared for llguidance: what they refuse, close and leave alone."""

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
from adafuse_llm.grammar import schema as prepared_schemas
from adafuse_llm.grammar.grammar import Grammar, GrammarState
from adafuse_llm.grammar.schema import enforceable
from tests.support.schemas import is_valid, walk

pytestmark = pytest.mark.quick

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def start(schema: Any) -> GrammarState:
    grammar = Grammar.of(AdaFuseConfig(json_schema=schema))
    assert grammar is not None
    return grammar.text()


# Documents

OBJECT, STRING, NUMBER, INTEGER = ({"type": t} for t in ("object", "string", "number", "integer"))
DATE, TIME, MOMENT = ({**STRING, "format": name} for name in ("date", "time", "date-time"))
DRAFT_3 = {"$schema": "http://json-schema.org/draft-03/schema#"}

FORBIDDEN: list[tuple[Any, Any]] = [
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
    ({**OBJECT, "propertyNames": {"enum": ["a\x00"]}}, {"a": 1}),
    ({"oneOf": [INTEGER, NUMBER]}, 1),
    ({"oneOf": [INTEGER, NUMBER], "x-guidance": {"coerce_one_of": True}}, 1),
    ({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}, 1),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1, "b": 1}),
    ({"oneOf": [{"type": ["string", "null"]}, {"type": "null"}]}, None),
    ({**INTEGER, "not": {"const": 1}, "x-guidance": {"lenient": True}}, 1),
    ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, 131074),
    ({**NUMBER, "anyOf": [{"multipleOf": 5}]}, 0.769803776),
    ({**NUMBER, "allOf": [{"multipleOf": 5}]}, 0.769803776),
    ({**NUMBER, "exclusiveMinimum": 9, "exclusiveMaximum": 9.5}, 9),
    ({**NUMBER, "minimum": -127523097680835.03}, -127523097680835.05),
    ({**INTEGER, "minimum": 2**53 + 1}, 2**53),
    ({**INTEGER, "maximum": -(2**53) - 1}, -(2**53)),
    ({"const": 2**53 + 1}, 2**53),
    ({**DRAFT_3, **INTEGER, "divisibleBy": 3}, 4),
    ({**DRAFT_3, **OBJECT, "properties": {"a": {**INTEGER, "required": True}}}, {}),
    *(({**STRING, "pattern": pattern}, text) for pattern, text in (
        ("^a++a$", "aa"), ("^[[:alpha:]]$", "q"), ("^a\\x00b$", "ab"), ("^\\S$", "\ufeff"),
        ("^.$", "\u2028"), ('^[^"]$', '"'), ("^[^\\\\]*$", "a\\"), ("^(?:[^ -~])$", '"'),
        ("^[\\x00-!#-\\x7f]$", '"'),
    )),
    ({**OBJECT, "patternProperties": {'^[^"]$': {"type": "null"}}, "additionalProperties": False},
     {'"': None}),
    *((DATE, day) for day in ("2100-02-29", "2021-02-29", "0000-01-01")),
    *((DATE, day) for day in ("2021-04-31", "2021-13-01", "2021-00-01", "2021-01-00", "2021-1-1")),
    *((MOMENT, text) for text in ("2021-02-29T00:00:00Z", "2021-02-28T22:59:60Z")),
    (TIME, "22:59:60Z"),
]  # fmt: skip
"""Schemas, and values that they forbid and that llguidance alone accepts."""

DOUBLED = {str(n): {"oneOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}
"""Definitions with 2**60 paths."""

FORBIDDEN_TEXTS: list[tuple[Any, str]] = [
    ({**OBJECT, "minProperties": 2}, '{"x": 1, "x": 1}'),
    ({**OBJECT, "minProperties": 2, "additionalProperties": INTEGER}, '{"x": 1, "x": 1}'),
    ({**OBJECT, "properties": {"a": INTEGER}}, '{"\\u0061": "x"}'),
    ({**OBJECT, "properties": {"a/b": {"const": 1}}}, '{"a/b": 1, "a\\/b": "x"}'),
    ({**OBJECT, "patternProperties": {"^a": INTEGER}}, '{"\\u0061b": "x"}'),
    ({**NUMBER, "exclusiveMaximum": 1}, "0.99999999999999999999"),
    ({**NUMBER, "exclusiveMaximum": 0.9, "minimum": 0}, "0.89999999999999999999"),
    ({**NUMBER, "minimum": 0, "maximum": 0.9999999999999999}, "0.999999999999999999"),
    ({**NUMBER, "exclusiveMinimum": -902.1516412216399}, "-902.1516412216399"),
    ({**NUMBER, "minimum": 0, "exclusiveMaximum": 1e-29}, "0." + "0" * 28 + "1"),
    ({**NUMBER, "exclusiveMinimum": 0}, "0." + "0" * 330 + "1"),
    ({**NUMBER, "exclusiveMaximum": 2**52}, "4503599627370495.9"),
    ({**NUMBER, "multipleOf": 2.5}, "4503599627370497.5"),
    ({"$ref": "#"}, ""),
    ({"$ref": "#/$defs/0", "$defs": DOUBLED}, "1"),
    *((schema, json.dumps(value, ensure_ascii=False)) for schema, value in FORBIDDEN),
]


@pytest.mark.parametrize(("schema", "document"), FORBIDDEN_TEXTS)
def test_what_a_schema_forbids_is_not_accepted(schema: Any, document: str) -> None:
    try:
        text = start(schema)
    except GrammarError:  # refused
        return
    assert not text.can_end(document)


EMAIL, URI = ({**STRING, "format": name} for name in ("email", "uri"))
DOMAIN = ".".join(["d" * 63] * 2 + ["e" * 60])
PYDANTIC_DECIMAL = {**STRING, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
URIS = (
    *("https://example.com/", "urn:isbn:0451450523", "microsoft.windows.camera.multipicker:x"),
    *("data:text/plain;base64," + "QUJD" * 1000, "mailto:a@b.de", "a:"),
)
EMAILS = ("a@b.de", "Jo.O'Neil+tag@mail.example.com", "l" * 64 + f"@{DOMAIN}", "x@[127.0.0.1]")


def written(*texts: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False) for text in texts]


def closed(**properties: Any) -> dict[str, Any]:
    """An object as zod describes it."""
    required = {"required": list(properties), "additionalProperties": False}
    return {**OBJECT, "properties": properties, **required}


NULL = {"type": "null"}
A_OR_B = {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a"]}
OTHERS = [closed(k={"const": "b"}, n={"const": number}) for number in (1, 2)]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (DATE, written("2024-02-29"), []),
        (MOMENT, written("2000-02-29T23:59:59.5+01:30"), []),
        (TIME, written("22:59:59Z"), []),
        (
            NUMBER,
            (
                *("0", "-3", "3.14159", "-0.000000001", "1234567.123456789"),
                *("9007199254740991", "-9007199254740991"),
            ),
            ("1e5", "0.1234567891", "9007199254740992", "1E-3", ".5", "01"),
        ),
        ({**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.001"], ["1"]),
        ({**NUMBER, "minimum": 0.1, "maximum": 0.3}, ["0.3"], ["0.4"]),
        ({**NUMBER, "minimum": 1234567.12345678}, ["1234567.12345678"], ["1234567.12345677"]),
        ({**INTEGER, "exclusiveMinimum": 1, "exclusiveMaximum": 3}, ["2"], ["1", "3"]),
        ({**NUMBER, "multipleOf": 0.5}, ["1.5"], ["1.25"]),
        ({**NUMBER, "const": 1e-10}, ["0.0000000001"], ["0"]),
        ({**NUMBER, "enum": [0.1234567891, 2]}, ["0.1234567891", "2"], ["1"]),
        ({"const": 123456789012345}, ["123456789012345"], ["1"]),
        ({**NUMBER, "allOf": [{"minimum": 0.95}, {"maximum": 1.5}]}, ["0.95"], ["0.9"]),
        ({**NUMBER, "anyOf": [{"minimum": 1.1}, {"maximum": 0.3}]}, ["1.1"], ["0.5"]),
        ({**OBJECT, "properties": {"a": INTEGER}}, ['{"a": 1, "b": "\\n"}'], []),
        ({**OBJECT, "required": ["a"], "minProperties": 1}, ['{"a": 1}'], []),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], []),
        ({"oneOf": [INTEGER, STRING]}, ["7"], []),
        ({"oneOf": [INTEGER]}, ["7"], ['"a"']),
        (
            {"oneOf": [{"enum": ["a", *range(20)]}, {"const": "b"}]},
            ['"a"', '"b"', "19"],
            ['"c"'],
        ),
        ({**STRING, "$id": "https://example.com/a"}, ['"a"'], []),
        ({**OBJECT, "minProperties": 0}, ["{}"], []),
        ({"propertyNames": False}, ["{}"], ['{"a": 1}']),
        (
            {"propertyNames": {"const": "a", "description": "d"}},
            ['{"a": 1}'],
            ['{"b": 1}', '{"a": 1, "a": 1}'],
        ),
        ({**STRING, "pattern": "^[^a]$"}, written("\u00e9"), []),
        ({"$ref": "#/definitions/A", "definitions": {"A": {"multipleOf": 5}}}, ["10"], ["11"]),
        ({"$ref": "#/$defs/a~1b~0", "$defs": {"a/b~": NULL}}, ["null"], ["1"]),
        (closed(a=NULL, b={"$ref": "#/properties/a"}), ['{"a": null, "b": null}'], ['{"a": null}']),
        (
            closed(name={}, sub={"items": {"$ref": "#"}}),
            ['{"name": 1, "sub": []}'],
            ['{"name": 1}'],
        ),
        ({"allOf": [closed(), OBJECT]}, ["{}"], ["1"]),
        ({"type": "array", "items": [STRING, {}], "minItems": 2}, ['["a", 1]'], ["[1, 1]"]),
        ({"$schema": DRAFT_7, "type": "array", "items": [STRING]}, ['["a", 1]'], ["[1]"]),
        (
            {"items": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a", 7]}}},
            ['["a", "a"]', '["a", 7]', "[]"],
            ['["a", 7, "a"]'],
        ),
        ({"items": {"enum": [7, 8]}, "maxItems": 3}, ["[7, 7, 7]"], ["[7, 7, 7, 7]"]),
        (
            {"oneOf": [closed(k={"const": "a"}), {"oneOf": OTHERS, "discriminator": {}}]},
            ['{"k": "b", "n": 2}'],
            ['{"k": "b", "n": 3}'],
        ),
        ({**A_OR_B, "additionalProperties": NULL}, ['{"a": null, "b": null}'], ['{"a": 1}']),
        (A_OR_B, ['{"a": 1, "b": 2}'], ['{"a": 1, "c": 2}']),
        ({**STRING, "pattern": "^x\\-y\\_\\/\\ z"}, written("x-y_/ z!"), written("x-y_/z")),
        (
            {**STRING, "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
            written("a-b"),
            written("a-"),
        ),
        (
            {**STRING, "format": "email", "pattern": "^a", "allOf": [{"pattern": "e$"}]},
            written("a@b.de"),
            written("b@b.de", "a@b.d", "a"),
        ),
        ({"type": ["string", "number"]}, ["1.5"], ["null"]),
        ({**INTEGER, "format": "int64"}, ["3"], [str(2**60)]),
        ({**STRING, "title": "t", "description": "d", "default": 3}, written("x"), []),
        (PYDANTIC_DECIMAL, written("1.5", "-.5", "007", "+1."), written("", "-", "+.", "1e5")),
        (EMAIL, written(*EMAILS), written("l" * 65 + "@b.de", f"a@{'d' * 64}.de")),
        (URI, written(*URIS), written("https" + "w" * 36 + ":")),
        (
            {**EMAIL, "pattern": "@b\\.de$", "maxLength": 9},
            written("ann@b.de"),
            written("ann@c.de", "annette@b.de", "ann@b.de.org"),
        ),
    ],
)
def test_what_a_schema_allows_stays_possible(schema: Any, right: Any, wrong: Any) -> None:
    before = repr(schema)
    enforceable(schema)
    assert repr(schema) == before
    text = start(schema)
    for document in right:
        assert text.can_end(document), document
    for document in wrong:
        assert not text.can_end(document), document


# Numbers and addresses


@pytest.mark.parametrize(
    "schema",
    [
        NUMBER,
        INTEGER,
        {**NUMBER, "minimum": 0, "exclusiveMaximum": 1},
        {"type": ["number", "null"]},
    ],
)
def test_digits_end(schema: dict[str, Any]) -> None:
    text = start(schema)
    for first in ("0", "0.", "1", "1.", "9", "-", "-1."):
        assert not [digit for digit in "0123456789" if text.holds(first + 40 * digit)]


def test_bounds_lose_no_number_of_a_few_decimals() -> None:
    """A number that begins as a bound may need zeros at its end, such as 0.90 beside 0.95."""
    chance = random.Random(3)
    for _ in range(60):
        low = round(chance.uniform(-1000, 1000), chance.randint(0, 4))
        high = round(low + chance.uniform(1, 500), chance.randint(0, 4))
        text = start({"type": "number", "minimum": low, "maximum": high})
        for value in (low, high, *(chance.uniform(low - 9, high + 9) for _ in range(6))):
            number = round(value, chance.randint(0, 6))
            spellings = [f"{number:.{decimals}f}" for decimals in range(8)]
            found = [float(each) for each in spellings if text.can_end(each) and float(each)]
            assert (number in found) is (low <= number <= high and number != 0)
            assert all(low <= each <= high for each in found)


@pytest.mark.parametrize(
    ("kind", "begun", "most"),
    [("email", "", 64), ("email", "a.b@", 63), ("email", "a@b-c.", 63), ("uri", "", 40)],
)
def test_parts_of_addresses_end(kind: str, begun: str, most: int) -> None:
    """A text cannot end inside these parts, so that a member has no other way out."""
    text = start({**STRING, "format": kind})
    text.commit(f'"{begun}{"a" * most}')
    assert not text.holds("a")
    assert walk(text, 0) is not None


# Patterns

ATOMS = (
    *("a", '"', "\\\\", ".", "\\d", "\\D", "\\w", "\\s", "\\S", "[^a]", '[^"]', "[^\\\\]"),
    *("[^\\d]", "[^\\w]", "[^\\s]", "[\\s\\S]", "[\\w1]", "[^ -~]", "[\\w-]", "[^-a]", "\\n"),
    *("[.]", "\\u0061", "[\\]]", "\\/", "#", " ", "[!-\\xff]", "\\.", "[^.]"),
)
CHARACTERS = ("a", "1", '"', "\\", "\n", "\r", "_", " ", "-", "]", ".", "\ufeff", "#", "\u2028")


def test_patterns_allow_only_what_python_allows() -> None:
    rng = random.Random(2)
    texts = ["", *CHARACTERS, *(x + y for x in CHARACTERS[:3] for y in CHARACTERS)]
    found = {True: 0, False: 0}
    for _ in range(40):
        one, two, three = rng.choices(ATOMS, k=3)
        pattern = f"^(?:{one}|({two}){rng.choice('*+?')}{three})$"
        try:
            schema = start({"pattern": pattern})
        except GrammarError:
            continue
        for text in texts:
            is_accepted = schema.can_end(json.dumps(text, ensure_ascii=False))
            found[is_accepted] += 1
            assert not is_accepted or re.search(pattern, text), (pattern, text)
    assert min(found.values()) > 200


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
        ({"multipleOf": 0}, "multipleOf"),
        ({**NUMBER, "anyOf": [{"multipleOf": 5}]}, "anyOf.0.multipleOf"),
        ({"$schema": DRAFT_7, "prefixItems": [{}]}, "prefixItems"),
        ({"properties": {"a": {}}, **A_OR_B}, "propertyNames"),
        ({"patternProperties": {"a": {}}, **A_OR_B}, "propertyNames"),
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


def test_schemas_that_cannot_be_read_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"items": deep}
    for schema, reason in (([], "must be an object"), (deep, "nested too deeply")):
        with pytest.raises(GrammarError, match=reason):
            enforceable(schema)  # type: ignore[arg-type]


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


# What pydantic writes


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(gt=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: bool = False


class Node(BaseModel):
    value: int
    children: "list[Node]" = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
TYPES = (
    *(str, float, str | None, dt.datetime, dt.time, dt.timedelta),
    *(uuid.UUID, AnyUrl, Decimal, Color, Literal["x", 1, True], Node, list[Pet | None]),
    *(Annotated[str, Field(min_length=2, max_length=5)], Annotated[int, Field(multiple_of=5)]),
    *(Annotated[str, Field(pattern=r"^[a-z]+-\d{2}$")], Annotated[int, Field(gt=0, lt=10)]),
    *(Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(gt=-12345678.5, lt=1e10)]),
    *(Annotated[list[int], Field(min_length=1, max_length=3)], tuple[int, str], tuple[int, ...]),
    *(
        dict[str, Any],
        dict[Literal["x", "y"], int],
        dict[Color, int],
        Annotated[dict[str, int], Field(min_length=1, max_length=3)],
        Cat | Dog,
    ),
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
