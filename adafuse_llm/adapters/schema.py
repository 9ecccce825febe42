"""Transform JSON schemas before they are enforced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""

_DATA = ("const", "enum", "default", "examples")
"""Keywords whose value is data."""

_OPEN = {"additionalProperties", "patternProperties", "propertyNames", "minProperties"}
_COMBINED = {"properties", "allOf", "anyOf", "oneOf", "$ref"}


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have only the properties that it lists.

    Members that follow a schema can add properties wherever the schema does not forbid it, which
    few authors intend. This function sets ``additionalProperties`` to false in each object schema
    that has ``properties`` and does not mention others. Every value that fits the result also fits
    `schema`. If the schema combines the properties of several schemas (such as ``allOf``), it is
    returned unchanged, because closing its parts could exclude every value.
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
            if key in _MAPS and isinstance(value, Mapping):
                part[key] = {name: closed(each) for name, each in value.items()}
            else:
                part[key] = value if key in _DATA else closed(value)
        parts, properties = part.get("allOf"), part.get("properties")
        combines |= len(_COMBINED & part.keys()) > 1 or (isinstance(parts, list) and len(parts) > 1)
        if not isinstance(properties, Mapping) or _OPEN & part.keys():
            return part
        lists_all = set(part.get("required") or ()) <= properties.keys()
        return {**part, "additionalProperties": False} if lists_all else part

    result: dict[str, Any] = closed(schema)
    return dict(schema) if combines else result
