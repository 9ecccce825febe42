"""Random JSON schemas that a grammar can enforce, and documents walked out of a grammar."""

import json
import random
from typing import Any

import jsonschema
from hypothesis import strategies as st
from referencing import Registry

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
"""A schema of an object with bounds."""

KEYS = ("a", "name", "age", "the light", "caf\u00e9", "\u4e2d", 'say "x"', "b\\c", "\U0001f600")
TEXTS = (
    *("", "x", "the harbour", "caf\u00e9 ", "\u4e2d\u6587", 'a "b" c', "\n", "\U0001f600", "a\\b"),
)
PATTERNS = (
    *("^[a-c]{1,4}$", "^\\d{2}$", "^(yes|no)$", "^[A-Z][a-z]+( [A-Z][a-z]+)?$", "e", "^.{3}$"),
    *("^\\w+@\\w+$", "^$", "^\u00e9+$"),
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "duration")

Schema = dict[str, Any]


def validator(schema: Schema) -> Any:
    """A validator of a schema that checks formats and fetches nothing."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER, registry=Registry())


def is_valid(schema: Schema, text: str) -> bool:
    """Whether a text is a document that fits a schema."""
    try:
        document = json.loads(text, parse_constant=_reject)
    except ValueError:
        return False
    return bool(validator(schema).is_valid(document))


def _reject(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _lengths(least: str, most: str, longest: int, room: int) -> st.SearchStrategy[Schema]:
    """No limits, one of the two keywords, or both."""
    return st.integers(0, longest).flatmap(
        lambda shortest: st.fixed_dictionaries(
            {}, optional={least: st.just(shortest), most: st.integers(shortest, shortest + room)}
        )
    )


STRINGS = st.one_of(
    _lengths("minLength", "maxLength", 4, 4),
    st.fixed_dictionaries({"pattern": st.sampled_from(PATTERNS)}),
    st.fixed_dictionaries({"format": st.sampled_from(FORMATS)}),
).map(lambda limits: {"type": "string", **limits})


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": draw(st.sampled_from(["integer", "number"]))}
    low: float = draw(st.integers(-300, 300))
    width: float = draw(st.integers(2, 500))
    if schema["type"] == "number" and draw(st.booleans()):
        low, width = low / 8, width / 4
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = low + width
    if schema["type"] == "integer" and len(schema) < 3 and draw(st.integers(0, 3)) == 0:
        schema["multipleOf"] = draw(st.integers(2, 12))
    return schema


VALUES = st.one_of(
    st.sampled_from(TEXTS), st.integers(-99, 99), st.booleans(), st.none(), st.just(0.5)
)
CONSTANTS = st.one_of(
    VALUES,
    st.lists(VALUES, max_size=2),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=2),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(st.sampled_from(KEYS), inner, max_size=3))
    schema: Schema = {"type": "object", "properties": properties}
    schema["required"] = [key for key in properties if draw(st.booleans())]
    more = draw(st.sampled_from([False, False, True, {"type": "integer"}]))
    return schema if more is True else {**schema, "additionalProperties": more}


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    schema: Schema = {"type": "array", "items": draw(inner)}
    schema |= draw(_lengths("minItems", "maxItems", 2, 3))
    if schema.get("maxItems") != 0 and draw(st.integers(0, 3)) == 0:
        schema["prefixItems"] = [draw(inner)]
    return schema


def _nullable(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


LEAVES = st.one_of(
    STRINGS,
    _numbers(),
    st.lists(VALUES, min_size=1, max_size=4, unique_by=json.dumps).map(lambda v: {"enum": v}),
    CONSTANTS.map(lambda value: {"const": value}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    STRINGS.map(_nullable),
)

RECURSIVE: Schema = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
}


def _branches(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.one_of(
        _objects(inner),
        _objects(inner).map(_nullable),
        _arrays(inner),
        st.lists(inner, min_size=2, max_size=3).map(lambda found: {"anyOf": found}),
        st.sampled_from([{"$ref": "#/$defs/chain"}, {"$ref": "#/$defs/word"}]),
    )


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Schemas of nested objects, arrays, unions, references, enumerations and bounded values."""
    schema = draw(st.recursive(LEAVES, _branches, max_leaves=6))
    if "$ref" in json.dumps(schema):
        schema = {**schema, "$defs": {"chain": RECURSIVE, "word": draw(STRINGS)}}
    return schema


def walk(text: Any, seed: int, longest: int = 160) -> str | None:
    """A random text of at most `longest` bytes of a grammar, or None if it did not end."""
    rng = random.Random(seed)
    state = text._state.deep_copy()
    found = bytearray()
    while len(found) < longest:
        mask = state.compute_bitmask()
        following = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if state.is_accepting() and (not following or rng.random() < 0.4):
            return found.decode()
        if not following:
            return None
        weights = [
            8.0 if byte in b'"}]' else 3.0 if 32 <= byte < 127 else 0.3 for byte in following
        ]
        (byte,) = rng.choices(following, weights)
        assert state.consume_token(byte)
        found.append(byte)
    return None
