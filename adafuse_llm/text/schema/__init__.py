"""Preparation of JSON schemas for a grammar compiler.

llguidance compiles a JSON schema to a grammar. It refuses most keywords that it cannot enforce, but
for some schemas it accepts documents that the schema forbids. `enforceable` closes these gaps. It
knows the keywords that the compiler enforces exactly, and refuses all others that limit values. It
returns a schema that the compiler enforces fully, or it raises an error that names the keyword.

The returned schema is never wider than the given one. It can be narrower. For example, the bounds
of numbers are rounded inward to 12 digits, times have no leap second, and numbers are from
-(2**53 - 1) to 2**53 - 1 with at most 9 decimals. Every JSON library reads such integers exactly.

Compile the returned schema with `COMPILE_OPTIONS`. The result depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adafuse_llm.errors import GrammarError, short_repr
from adafuse_llm.text.schema.keywords import Preparation
from adafuse_llm.text.schema.patterns import MAX_PATTERN
from adafuse_llm.text.schema.values import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_VALUES,
    TOO_DEEP,
    check_json,
)

__all__ = [
    "COMPILE_OPTIONS",
    "MAX_CHARACTERS",
    "MAX_DEPTH",
    "MAX_PATTERN",
    "MAX_VALUES",
    "enforceable",
]

COMPILE_OPTIONS: Mapping[str, Any] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""The options of llguidance with which a schema from `enforceable` is to be compiled.

There are no ``\\uXXXX`` escapes. Otherwise a response could spell the name of a property with an
escape, and the schema of that property would not apply.
"""


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that llguidance enforces fully, or refuse the schema.

    A document that the returned schema allows is allowed by the given schema too. The draft is
    the one that ``$schema`` names, from draft-06 to 2020-12, and 2020-12 without it. Formats are
    enforced. A number that has no bound on a side gets the bound -(2**53 - 1) or 2**53 - 1 there,
    and it has at most 9 decimals and no exponent, so that its digits end. Decimals are not limited
    beside `multipleOf`, in schemas with `allOf`, and if the bounds are too near. Patterns must mean
    the same to Python's `re` as to the compiler. Annotations and unknown keywords are left out.
    Parts that a ``$ref`` names are moved to ``$defs``.

    Args:
        schema: the JSON schema. It is not changed.

    Returns:
        A schema of draft 2020-12, to be compiled with `COMPILE_OPTIONS`.

    Raises:
        GrammarError: the schema is invalid, too large, or uses a keyword that cannot be enforced.
            The message names the keyword with its path, such as ``properties.age.minimum``.
    """
    if not isinstance(schema, dict):
        raise GrammarError(
            "a JSON schema must be an object, such as {'type': 'object', 'properties': {...}}; "
            f"got {short_repr(schema)}."
        )
    check_json(schema)
    try:
        return Preparation(schema).run()
    except RecursionError:
        raise GrammarError(TOO_DEEP) from None
