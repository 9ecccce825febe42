"""Transform JSON schemas before they are enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
"""Keywords whose value maps names to schemas."""

_DATA = ("const", "enum", "default", "examples")
"""Keywords whose value is data."""

_OPEN = {"additionalProperties", "patternProperties", "propertyNames", "minProperties"}
_COMBINED = {"properties", "allOf", "anyOf", "oneOf", "$ref"}
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have only the properties that it lists.

    Members that follow a schema can add properties wherever the schema does not forbid it, which
    few authors intend. This function sets ``additionalProperties`` to false in each object schema
    that has ``properties`` and does not mention others. Every value that fits the result also fits
    `schema`. If the schema combines the properties of several schemas (such as ``allOf``), it is
    returned unchanged, because closing its parts could exclude every value.
    """
    combines = False

    def closed(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal combines
        parts, properties = part.get("allOf"), part.get("properties")
        combines = combines or len(_COMBINED & part.keys()) > 1
        combines = combines or (isinstance(parts, list) and len(parts) > 1)
        if not isinstance(properties, Mapping) or _OPEN & part.keys():
            return part
        lists_all = set(part.get("required") or ()) <= properties.keys()
        return {**part, "additionalProperties": False} if lists_all else part

    mapped: dict[str, Any] = _mapped(schema, closed)
    return dict(schema) if combines else mapped


def recursive_schema(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a schema that contains itself, without titles; None for every other schema.

    A schema that only refers to a definition becomes this definition.
    """
    parts: dict[str, Any] = {
        f"#/{keyword}/{name}": part
        for keyword in _DEFINITIONS
        for name, part in (schema.get(keyword) or {}).items()
    }
    parts["#"] = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
    refs = {at: {*_REFERENCE.findall(json.dumps(part))} for at, part in parts.items()}
    for _ in refs:  # references of references
        for found in refs.values():
            found.update(*[refs.get(ref, ()) for ref in found])
    if not any(at in found for at, found in refs.items()):
        return None
    whole = {**parts.get(schema.get("$ref", ""), {}), **schema}
    whole.pop("$ref", None)
    return dict(_mapped(whole, lambda part: {k: v for k, v in part.items() if k != "title"}))


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
