"""Whether plain data fits a JSON schema: the keywords that pydantic and TypedDicts produce."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}

BOUNDS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
SIZES = {
    "minLength": (str, lambda size, bound: size >= bound),
    "maxLength": (str, lambda size, bound: size <= bound),
    "minItems": (list, lambda size, bound: size >= bound),
    "maxItems": (list, lambda size, bound: size <= bound),
}


def problems(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """What is wrong with `value`, each with its place; nothing if it fits."""
    return list(_problems(value, schema, schema, "the reply"))


def _problems(value: Any, schema: Any, root: Mapping[str, Any], place: str) -> Iterator[str]:
    if isinstance(schema, bool):
        if not schema:
            yield f"{place} is not allowed"
        return
    if "$ref" in schema:
        yield from _problems(value, _resolve(schema["$ref"], root), root, place)
    for part in schema.get("allOf", ()):
        yield from _problems(value, part, root, place)
    for choice in ("anyOf", "oneOf"):
        options = [list(_problems(value, part, root, place)) for part in schema.get(choice, ())]
        if options and all(options):
            yield f"{place} fits none of its alternatives ({'; '.join(o[0] for o in options)})"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} must be one of {schema['enum']}; got {value!r:.60}"
    if "const" in schema and value != schema["const"]:
        yield f"{place} must be {schema['const']!r}; got {value!r:.60}"
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_is(value, name) for name in types):
            yield f"{place} must be of type {' or '.join(types)}; got {value!r:.60}"
            return
    yield from _inside(value, schema, root, place)


def _inside(value: Any, schema: Mapping[str, Any], root: Any, place: str) -> Iterator[str]:
    """What is wrong with bounds, items and properties."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for name, holds in BOUNDS.items():
            if name in schema and not holds(value, schema[name]):
                yield f"{place} breaks {name} {schema[name]}; got {value}"
    for name, (kind, holds) in SIZES.items():
        if name in schema and isinstance(value, kind) and not holds(len(value), schema[name]):
            yield f"{place} breaks {name} {schema[name]}; got {len(value)}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{place} does not match {schema['pattern']!r}; got {value!r:.60}"
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            yield from _problems(item, schema["items"], root, f"{place}[{number}]")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{place} lacks {name!r}"
        for name, item in value.items():
            inner = known.get(name, schema.get("additionalProperties", True))
            yield from _problems(item, inner, root, f"{place}[{name!r}]")


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES.get(name, (object,)))


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found
