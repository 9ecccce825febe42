"""Prepare schemas for LangChain's converters, which would drop parts of them."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from typing_extensions import NotRequired, Required, TypedDict, get_type_hints, is_typeddict

from adafuse_llm.errors import InvalidInputError

Schema = dict[str, Any] | type
"""A pydantic class, a TypedDict, or a dict with a JSON schema."""

CONSTRAINTS = frozenset(
    ("$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "oneOf", "properties")
)
"""Keywords of JSON schemas. A JSON schema with none of them and no ``type`` accepts any value."""

HOLDERS = ("schema", "parameters", "input_schema")
"""Keys of the JSON schema in the dicts that the APIs of OpenAI and Anthropic use."""


def prepare(schema: Schema) -> Schema:
    """Return a schema that LangChain's converters turn into a complete JSON schema.

    The converters drop None from the types of a TypedDict. They also drop the JSON schema from
    some dicts that contain one, and the result would accept any value.

    Returns:
        A pydantic class unchanged; a TypedDict whose types keep None; an OpenAI function for a
        dict.

    Raises:
        InvalidInputError: a dict contains no JSON schema, or one that accepts any value.
    """
    if isinstance(schema, dict):
        return _to_function(schema)
    return _keep_none(schema) if is_typeddict(schema) else schema


def _to_function(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema in a dict, with its name and description, as an OpenAI function."""
    kind = schema.get("type")
    wrapper = schema.get(kind, schema) if kind in ("json_schema", "function") else schema
    if isinstance(wrapper, Mapping):
        key = next((key for key in HOLDERS if key in wrapper), None)
        body = wrapper if key is None else wrapper[key]
        is_schema = key is not None or kind not in ("json_schema", "function")
        if is_schema and isinstance(body, Mapping) and {*CONSTRAINTS, "type"} & body.keys():
            function = {"name": str(wrapper.get("name") or body.get("title") or "output")}
            if description := wrapper.get("description") or body.get("description"):
                function["description"] = description
            labels = ("name", "title", "description")
            return {**function, "parameters": {k: v for k, v in body.items() if k not in labels}}
    raise InvalidInputError(
        "a schema must be a pydantic class, a TypedDict, a JSON schema with a type or other "
        "constraints, or a dict that contains such a JSON schema: {'name': ..., 'schema': ...}, "
        "{'name': ..., 'parameters': ...} or {'type': 'json_schema', 'json_schema': {'name': ..., "
        f"'schema': ...}}}}; got {schema!r:.120}"
    )


class _Null:
    """A type for pydantic v1 with the JSON schema of None. LangChain's converter uses pydantic v1,
    which drops None from schemas.
    """

    @classmethod
    def __get_validators__(cls) -> Iterator[Any]:
        yield from ()

    @classmethod
    def __modify_schema__(cls, schema: dict[str, Any]) -> None:
        schema["type"] = "null"


def _keep_none(hint: Any, outer: tuple[Any, ...] = ()) -> Any:
    """Return a type with `_Null` in place of None, also in nested types.

    Args:
        hint: the type.
        outer: the TypedDicts that contain the type.

    Raises:
        InvalidInputError: a TypedDict contains itself, which LangChain's converter cannot handle.
    """
    if hint in (None, types.NoneType):
        return _Null
    if hint in outer:
        raise InvalidInputError(
            f"the schema {outer[0].__name__} is not usable, because the TypedDict {hint.__name__} "
            "contains itself; use a pydantic class"
        )
    if is_typeddict(hint):
        return _keep_none_in_fields(hint, (*outer, hint))
    generic: Any = get_origin(hint)
    arguments = get_args(hint)
    if not arguments or (generic is Literal and None not in arguments):
        return hint
    if generic is Literal:
        arguments = tuple(_Null if value is None else Literal[value] for value in arguments)
    elif generic is Annotated:
        arguments = (_keep_none(arguments[0], outer), *arguments[1:])
    else:
        arguments = tuple(_keep_none(argument, outer) for argument in arguments)
    return (Union if generic in (Literal, types.UnionType) else generic)[arguments]


def _keep_none_in_fields(typed_dict: Any, outer: tuple[Any, ...]) -> Any:
    """Return a TypedDict with converted types. LangChain knows optional keys by their default."""
    fields: dict[str, Any] = {}
    for name, declared in get_type_hints(typed_dict, include_extras=True).items():
        hint: Any = declared
        required = name in typed_dict.__required_keys__
        if (marker := cast("Any", get_origin(hint))) in (Required, NotRequired):
            required, hint = marker is Required, get_args(hint)[0]
        fields[name] = _keep_none(hint, outer)
        if not required and get_origin(hint) is not Annotated:
            fields[name] = Annotated[fields[name], None]
    converted = cast("Any", TypedDict)(typed_dict.__name__, fields)
    converted.__doc__ = typed_dict.__doc__ or ""  # otherwise, LangChain uses the one of `dict`
    return converted
