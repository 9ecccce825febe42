"""Transform JSON schemas before they are enforced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS, "dependentSchemas")
"""Keywords whose value maps names to schemas."""

_DATA = ("const", "enum", "default", "examples")
"""Keywords whose value is data."""

_OTHER_PROPERTIES = (
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
    *("minProperties", "dependentSchemas", "dependentRequired"),
)

_COMBINATIONS = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "not")


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have only the properties that it lists.

    Members that follow a schema can add properties wherever the schema does not forbid it, which
    few authors intend. This function sets ``additionalProperties`` to false in each object schema
    that has ``properties`` and does not mention others. Every value that fits the result also fits
    `schema`. If the schema combines the properties of several schemas (such as ``allOf``), it is
    returned unchanged, because closing its parts could exclude every value.
    """
    if any(_combines_properties(part) for part in subschemas(schema)):
        return dict(schema)
    closed: dict[str, Any] = _mapped(schema, _closed)
    return closed


def _combines_properties(schema: Mapping[str, Any]) -> bool:
    combinations = [key for key in _COMBINATIONS if key in schema]
    parts = schema.get("allOf")
    return (
        (bool(combinations) and "properties" in schema)
        or len(combinations) > 1
        or (isinstance(parts, list) and len(parts) > 1)
        or bool({"if", "not", "dependentSchemas", "$dynamicRef"} & schema.keys())
    )


def recursive_schema(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a schema that contains itself, without titles; None for every other schema.

    A schema that only refers to a definition becomes this definition.
    """
    parts: dict[str, Mapping[str, Any]] = {"#": _without(schema, *_DEFINITIONS)}
    for keyword in _DEFINITIONS:
        parts |= {f"#/{keyword}/{name}": each for name, each in (schema.get(keyword) or {}).items()}
    inner = {at: {str(each.get("$ref")) for each in subschemas(part)} for at, part in parts.items()}
    for _ in parts:  # references of references
        for refs in inner.values():
            refs.update(*[inner.get(ref, ()) for ref in refs])
    if not any(at in refs for at, refs in inner.items()):
        return None
    whole = {**parts.get(schema.get("$ref", ""), {}), **_without(schema, "$ref")}
    return dict(_mapped(whole, lambda part: _without(part, "title")))


def _without(schema: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas in it."""
    if isinstance(schema, (list, tuple)):
        for item in schema:
            yield from subschemas(item)
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            yield from subschemas(list(value.values()))
        elif key not in _DATA:
            yield from subschemas(value)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if (
        isinstance(properties, Mapping)
        and not any(key in schema for key in _OTHER_PROPERTIES)
        and set(schema.get("required") or ()) <= properties.keys()
    ):
        return {**schema, "additionalProperties": False}
    return schema


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema with a function applied to it and to all schemas in it."""
    if isinstance(schema, (list, tuple)):
        return [_mapped(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    mapped: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            mapped[key] = {name: _mapped(part, change) for name, part in value.items()}
        else:
            mapped[key] = value if key in _DATA else _mapped(value, change)
    return change(mapped)
