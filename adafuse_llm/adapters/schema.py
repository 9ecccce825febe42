"""Prepare JSON schemas for enforcement."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from adafuse_llm.errors import GrammarError, InvalidInputError
from adafuse_llm.grammar.grammar import Grammar, json_rule
from adafuse_llm.grammar.schema import is_absent

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""

_DATA = ("const", "enum", "default", "examples")
"""Keywords whose value is data and not a schema."""

_OPEN = {"additionalProperties", "patternProperties", "propertyNames", "minProperties"}
_COMBINED = {"properties", "allOf", "anyOf", "oneOf", "$ref"}


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects can have only the properties that it lists.

    Few authors want other properties, but few forbid them. ``additionalProperties`` becomes false
    in object schemas that list all required ``properties`` and have no keyword about others. But it
    leaves a schema as it is that combines the properties of several schemas, as with ``allOf``,
    because closing its parts could exclude all values.
    """
    combines = False

    def closed(schema: Any) -> Any:
        nonlocal combines
        if isinstance(schema, (list, tuple)):
            return [closed(item) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        part: dict[str, Any] = {}
        for key, value in schema.items():
            if is_absent(key, value):
                continue
            if key in _MAPS and isinstance(value, Mapping):
                part[key] = {name: closed(inner) for name, inner in value.items()}
            else:
                part[key] = value if key in _DATA else closed(value)
        parts, properties = part.get("allOf"), part.get("properties")
        if len(_COMBINED & part.keys()) > 1 or (isinstance(parts, list) and len(parts) > 1):
            combines = True
        if not isinstance(properties, Mapping) or _OPEN & part.keys():
            return part
        lists_all = set(part.get("required") or ()) <= properties.keys()
        return {**part, "additionalProperties": False} if lists_all else part

    result: dict[str, Any] = closed(schema)
    return dict(schema) if combines else result


def closed_schema(
    schema: Mapping[str, Any], problems: list[str] | None = None
) -> tuple[dict[str, Any], str]:
    """Return the enforceable part of a schema, with closed objects, and the Lark rule of this part.

    `problems` receives a reason for each part that is left out. If `problems` is None, such a part
    raises a `GrammarError`.

    Raises:
        InvalidInputError: the schema cannot be written as JSON.
        GrammarError: the schema cannot be enforced.
        MissingDependencyError: llguidance is not installed.
    """
    try:
        source = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the schema cannot be written as JSON: {error}") from error
    text, rule, left_out = _closed(source, is_strict=problems is None)
    if problems is not None:
        problems += left_out
    return json.loads(text), rule


@functools.lru_cache(maxsize=1024)
def _closed(source: str, *, is_strict: bool) -> tuple[str, str, tuple[str, ...]]:
    schema: Any = json.loads(source)
    problems: list[str] = []
    while True:
        closed = close_objects(schema)
        try:
            return json.dumps(closed), _rule(closed), tuple(problems)
        except GrammarError as error:
            path = error.path or _path_of_bad_property(schema)
            if is_strict or not _leave_out(schema, path):
                raise
            problems.append(str(error))


def _rule(schema: dict[str, Any]) -> str:
    rule = json_rule(schema)
    Grammar("json_schema", f"start: {rule}")
    return rule


def _path_of_bad_property(schema: dict[str, Any]) -> tuple[str, ...]:
    """Return the path of the first property that cannot be enforced, or an empty path."""
    properties = schema.get("properties")
    for name in properties if isinstance(properties, dict) else ():
        try:
            _rule({**schema, "properties": {name: schema["properties"][name]}, "required": [name]})
        except GrammarError:
            return ("properties", name)
    return ()


def _leave_out(schema: Any, path: tuple[str, ...]) -> bool:
    """Remove the keyword, or the rules of a property, at a path. Return whether any were there."""
    *parents, last = path or ("",)
    is_map = False  # whether the keys of `schema` are names, such as those of properties
    for key in parents:
        if isinstance(schema, list) and key.isdigit() and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, dict) and key in schema:
            schema = schema[key]
        else:
            return False
        is_map = not is_map and key in _MAPS
    if not isinstance(schema, dict) or last not in schema or (is_map and schema[last] == {}):
        return False
    if is_map:
        schema[last] = {}  # in its place, because properties are written in this order
        return True
    left_out = schema.pop(last)
    if last == "oneOf":
        schema.setdefault("anyOf", left_out)
    if last in _OPEN:  # what it allowed stays allowed
        schema["additionalProperties"] = {}
    return True
