"""Transform JSON schemas before they are enforced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
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
    if any(_combines_properties(part) for part in _parts(schema)):
        return dict(schema)
    closed: dict[str, Any] = _closed(schema)
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


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas in it."""
    if isinstance(schema, (list, tuple)):
        for item in schema:
            yield from _parts(item)
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            yield from _parts(list(value.values()))
        elif key not in _DATA:
            yield from _parts(value)


def _closed(schema: Any) -> Any:
    if isinstance(schema, (list, tuple)):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            closed[key] = {name: _closed(part) for name, part in value.items()}
        else:
            closed[key] = value if key in _DATA else _closed(value)
    properties = closed.get("properties")
    if (
        isinstance(properties, Mapping)
        and not any(key in closed for key in _OTHER_PROPERTIES)
        and set(closed.get("required") or ()) <= properties.keys()
    ):
        closed["additionalProperties"] = False
    return closed
