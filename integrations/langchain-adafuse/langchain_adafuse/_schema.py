"""Whether plain data fits a JSON schema: the keywords that pydantic and TypedDicts produce."""

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
"""Of numbers, or of the sizes of texts and arrays."""


def problems(value: Any, schema: Schema) -> list[str]:
    """What is wrong with `value`, each with its place; nothing if it fits."""
    return list(_problems(value, schema, schema, "the reply"))


def _problems(value: Any, schema: Any, root: Schema, place: str) -> Iterator[str]:
    if schema is False:
        yield f"{place} is not allowed"
    if isinstance(schema, Mapping):
        for check in (_references, _alternatives, _values):
            yield from check(value, schema, root, place)


def _references(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
    if "$ref" in schema:
        yield from _problems(value, _target(schema["$ref"], root), root, place)


def _target(reference: str, root: Schema) -> Any:
    """What a reference within the schema (``#``, ``#/$defs/Name``) stands for.

    Raises:
        InvalidInputError: there is no such thing in the schema.
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
            f"the schema refers to {reference!r}, which it does not hold; references must be to "
            "parts of the schema itself, such as '#/$defs/Name'"
        )
    return target


def _alternatives(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
    for part in schema.get("allOf", ()):
        yield from _problems(value, part, root, place)
    for choice in ("anyOf", "oneOf"):
        wrong = [list(_problems(value, part, root, place)) for part in schema.get(choice, ())]
        if wrong and all(wrong):
            yield f"{place} fits none of its alternatives ({'; '.join(each[0] for each in wrong)})"


def _values(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and value not in allowed:
        yield f"{place} must be one of {allowed}; got {value!r:.60}"
    named = schema.get("type", ())
    types = (named,) if isinstance(named, str) else named
    if types and not any(_is(value, name) for name in types):
        yield f"{place} must be of type {' or '.join(types)}; got {value!r:.60}"
        return
    if isinstance(value, (int, float, str, list)) and not isinstance(value, bool):
        yield from _bounds(value, schema, place)
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, schema.get("items"), root, f"{place}[{number}]")
    if isinstance(value, dict):
        yield from _properties(value, schema, root, place)


def _bounds(value: float | str | list[Any], schema: Schema, place: str) -> Iterator[str]:
    size = value if isinstance(value, (int, float)) else len(value)
    for name, holds in BOUNDS.items():
        of_numbers = name.endswith("imum")
        if name in schema and of_numbers == (size is value) and not holds(size, schema[name]):
            yield f"{place} breaks {name} {schema[name]}; got {size}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{place} does not match {schema['pattern']!r}; got {value!r:.60}"


def _properties(value: dict[str, Any], schema: Schema, root: Schema, place: str) -> Iterator[str]:
    yield from (f"{place} lacks {n!r}" for n in schema.get("required", ()) if n not in value)
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, item in value.items():
        yield from _problems(item, known.get(name, others), root, f"{place}[{name!r}]")


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES.get(name, (object,)))
