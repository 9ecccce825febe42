"""Structured output: instructions for the members, and parsers of the JSON in their replies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from adafuse_llm.adapters.reply import read_json
from adafuse_llm.errors import InvalidInputError

_BRACKET_OR_STRING = re.compile(r'[{}\[\]]|"(?:[^"\\\n]|\\.)*"')
CUT_OFF = "max_tokens or the context window cut the JSON off"


def schema_instructions(schema: Mapping[str, Any]) -> str:
    """Return instructions to reply in JSON. They belong at the end of the system message.

    Args:
        schema: a JSON schema of the reply.

    Raises:
        InvalidInputError: the schema cannot be written as JSON.
    """
    try:
        compact = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the schema cannot be written as JSON: {error}") from error
    return (
        "Reply with one JSON value that fits this JSON schema, and with nothing else: no "
        f"explanation, no code fence, not the schema itself.\n{compact}"
    )


def find_json(text: str, *, closing: str = "", is_cut: bool = False) -> Any:
    """Parse the JSON in a reply, ignoring code fences and text around it.

    If the whole reply is not JSON, the value is its longest object or array.

    Args:
        text: the reply, without reasoning.
        closing: the end of the reply that the engine made up (`Generation.closing`).
        is_cut: whether the reply ended at a length limit.

    Raises:
        ValueError: the reply has no JSON, or the JSON is cut off or malformed.
    """
    if closing:
        raise ValueError(f"{CUT_OFF} after {text.removesuffix(closing)[-40:]!r}")
    try:
        value = read_json(text)
    except ValueError as error:
        regions = list(_regions(text)) or [text]
        region = regions[-1] if is_cut and text.endswith(regions[-1]) else max(regions, key=len)
        try:
            value = read_json(region)
        except ValueError as inner:
            reason = inner if region != text else error
            problem = CUT_OFF if is_cut else "the reply has no whole JSON"
            raise ValueError(f"{problem}: {reason}") from None
    if is_cut and type(value) in (int, float):  # the next digit is missing
        raise ValueError(f"{CUT_OFF} after {text[-40:]!r}")
    return value


def partial_json(text: str) -> str:
    """Return the JSON in an unfinished reply, or "" if the reply has none yet.

    This is the longest object or array, even if it is not closed.
    """
    return max(_regions(text), key=len, default="")


def _regions(text: str) -> Iterator[str]:
    """Yield the outermost objects and arrays of a text, in order. The last may not be closed."""
    start = depth = 0
    for match in _BRACKET_OR_STRING.finditer(text):
        if match[0] in "{[":
            start = start if depth else match.start()
            depth += 1
        elif match[0] in "}]" and depth:
            depth -= 1
            if not depth:
                yield text[start : match.end()]
    if depth:
        yield text[start:]
