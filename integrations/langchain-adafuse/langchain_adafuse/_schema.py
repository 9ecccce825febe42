"""Validation of plain data against a JSON schema.

It supports the keywords in the schemas of pydantic classes and TypedDicts.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from adafuse_llm.errors import InvalidInputError

Schema = Mapping[str, Any]

TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}

BOUNDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "minLength": operator.ge,
    "maxLength": operator.le,
    "minItems": operator.ge,
    "maxItems": operator.le,
}
"""By keyword, the comparison that a number, or the length of a value, must satisfy."""


def problems(value: Any, schema: Schema) -> list[str]:
    """Return one message per violation of the schema, each with the path of the wrong value."""
    return list(_problems(value, schema, schema, "the reply"))


def _problems(value: Any, schema: Any, root: Schema, path: str) -> Iterator[str]:
    if schema is False:
        yield f"{path} is not allowed"
    if isinstance(schema, Mapping):
        for check in (_references, _alternatives, _values):
            yield from check(value, schema, root, path)


def _references(value: Any, schema: Schema, root: Schema, path: str) -> Iterator[str]:
    if "$ref" in schema:
        yield from _problems(value, _target(schema["$ref"], root), root, path)


def _target(reference: str, root: Schema) -> Any:
    """Resolve a reference within the schema, such as ``#`` or ``#/$defs/Name``.

    Raises:
        InvalidInputError: the reference does not point to a part of the schema.
    """
    target: Any = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not (isinstance(target, Mapping) and name in target):
            target = None
            break
        target = target[name]
    if not reference.startswith("#") or target is None:
        raise InvalidInputError(
            f"the schema refers to {reference!r}, which it does not contain; references must point "
            "to parts of the schema itself, such as '#/$defs/Name'"
        )
    return target


def _alternatives(value: Any, schema: Schema, root: Schema, path: str) -> Iterator[str]:
    for part in schema.get("allOf", ()):
        yield from _problems(value, part, root, path)
    for choice in ("anyOf", "oneOf"):
        branches = [list(_problems(value, part, root, path)) for part in schema.get(choice, ())]
        if branches and all(branches):
            firsts = "; ".join(messages[0] for messages in branches)
            yield f"{path} fits none of its alternatives ({firsts})"


def _values(value: Any, schema: Schema, root: Schema, path: str) -> Iterator[str]:
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and value not in allowed:
        yield f"{path} must be one of {allowed}; got {value!r:.60}"
    declared = schema.get("type", ())
    types = (declared,) if isinstance(declared, str) else declared
    if types and not any(_has_type(value, name) for name in types):
        yield f"{path} must be of type {' or '.join(types)}; got {value!r:.60}"
        return
    if isinstance(value, (int, float, str, list)) and not isinstance(value, bool):
        yield from _bounds(value, schema, path)
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, schema.get("items"), root, f"{path}[{number}]")
    if isinstance(value, dict):
        yield from _properties(value, schema, root, path)


def _bounds(value: float | str | list[Any], schema: Schema, path: str) -> Iterator[str]:
    size = value if isinstance(value, (int, float)) else len(value)
    for name, holds in BOUNDS.items():
        bounds_value = name.endswith("imum")
        if name in schema and bounds_value == (size is value) and not holds(size, schema[name]):
            yield f"{path} breaks {name} {schema[name]}; got {size}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{path} does not match {schema['pattern']!r}; got {value!r:.60}"


def _properties(value: dict[str, Any], schema: Schema, root: Schema, path: str) -> Iterator[str]:
    yield from (f"{path} lacks {n!r}" for n in schema.get("required", ()) if n not in value)
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, item in value.items():
        yield from _problems(item, known.get(name, others), root, f"{path}[{name!r}]")


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES.get(name, (object,)))
