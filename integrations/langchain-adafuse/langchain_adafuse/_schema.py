"""Validation of plain data against a JSON schema. Nothing is read from a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from adafuse_llm.adapters.schema import subschemas
from adafuse_llm.errors import InvalidInputError, short_repr

Schema = Mapping[str, Any]

MAX_REASON = 300
"""Longest reason in a message, in characters. The validator's messages repeat whole values."""


def check_schema(schema: Schema) -> None:
    """Check that values can be validated against a schema.

    Raises:
        InvalidInputError: the schema is invalid, has a pattern that Python's ``re`` cannot read, or
            refers to a schema that it does not contain.
    """
    try:
        _validator_class(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        place = "".join(f"[{part!r}]" for part in error.absolute_path)
        problem = _shortened(error.message)
        if error.validator == "format" and error.validator_value == "regex":
            problem = f"Python's re module cannot read the pattern {short_repr(error.instance)}"
        raise InvalidInputError(f"the schema is invalid at schema{place}: {problem}") from None
    parts = list(subschemas(schema))
    if any({"$id", "$anchor", "$dynamicAnchor"} & part.keys() for part in parts):
        return  # `problems` resolves the references
    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
    for part in parts:
        reference = part.get("$ref", "#")
        try:
            target = resolver.lookup(reference).contents
        except (Unresolvable, ValueError, TypeError):  # the last two for a pointer into a scalar
            target = None
        if not isinstance(target, (Mapping, bool)):
            raise _missing(reference)


def problems(value: Any, schema: Schema) -> list[str]:
    """Return one message per violation of the schema, each with the path of the wrong value.

    Raises:
        InvalidInputError: the schema refers to a schema that it does not contain, or to itself
            without end.
    """
    kind = _validator_class(schema)
    validator = kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
    try:
        return list(_messages(validator.iter_errors(value)))
    except Unresolvable as error:
        raise _missing(error.ref if error.ref[:1] != "/" else f"#{error.ref}") from None
    except RecursionError:
        raise InvalidInputError("the schema refers to itself without end") from None


def _validator_class(schema: Schema) -> Any:
    return validator_for(schema, default=jsonschema.Draft202012Validator)


def _messages(errors: Iterator[jsonschema.ValidationError]) -> Iterator[str]:
    for error in errors:
        path = "".join(f"[{part!r}]" for part in error.absolute_path)
        branches: dict[Any, str] = {}  # the first problem of each alternative
        for inner in error.context or ():
            branches.setdefault(inner.schema_path[0], inner.message)
        reasons = "; ".join(branches.values())
        message = f"{error.message} ({reasons})" if reasons else error.message
        yield f"the reply{path}: {_shortened(message)}"


def _missing(reference: str) -> InvalidInputError:
    return InvalidInputError(
        f"the schema refers to {reference!r}, which it does not contain; references must point to "
        "parts of the schema itself, such as '#/$defs/Name'"
    )


def _shortened(message: str) -> str:
    return message if len(message) <= MAX_REASON else f"{message[: MAX_REASON - 3]}..."
