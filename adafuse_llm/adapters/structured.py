"""Structured output: instructions for the members, and parsers of the JSON in their replies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from adafuse_llm.adapters.reply import read_json
from adafuse_llm.errors import InvalidInputError

_FENCED = re.compile(r"```\w*\s*\n(.*?)\n?\s*```", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)', re.DOTALL)
CUT_OFF = "max_tokens or the context window cut the JSON off"
_BRACKETS = {"{": "}", "[": "]"}


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
    """Parse the JSON value in a reply, ignoring code fences and text around it.

    If the whole reply is not JSON, the value is its longest outermost object or array.

    Args:
        text: the reply, without reasoning.
        closing: the end of the reply that the engine made up (`Generation.closing`).
        is_cut: whether the reply ended at a length limit.

    Raises:
        ValueError: the reply has no JSON, or the JSON is cut off or malformed.
    """
    if closing:
        raise ValueError(f"{CUT_OFF} after {text.removesuffix(closing)[-40:]!r}")
    value = _find_json(text, is_cut=is_cut)
    if is_cut and type(value) in (int, float):  # the next digit is missing
        raise ValueError(f"{CUT_OFF} after {text[-40:]!r}")
    return value


def _find_json(text: str, *, is_cut: bool) -> Any:
    answer = text.strip()
    fenced = _FENCED.fullmatch(answer)
    for candidate in (text, *(fenced.groups() if fenced else ())):
        try:
            return read_json(candidate)
        except ValueError:
            continue
    regions = list(_regions(answer))
    if not regions:
        detail = f"it begins with {answer[:40]!r}" if answer else "it is empty"
        raise ValueError(f"the reply holds no JSON object or array; {detail}")
    region = max(regions, key=lambda region: len(region.text))
    region = region if regions[-1].closed or not is_cut else regions[-1]
    if not region.closed:
        raise ValueError(f"the JSON is cut off: it ends with {region.text[-40:]!r}")
    try:
        return read_json(region.text)
    except ValueError as error:
        raise ValueError(f"the JSON is malformed: {error}") from None


def partial_json(text: str) -> str:
    """Return the JSON in an unfinished reply, or "" if the reply has none yet.

    This is the longest outermost object or array, even if it is not closed.
    """
    regions = (region.text for region in _regions(text))
    return max(regions, key=len, default="")


class _Region(NamedTuple):
    """An outermost object or array in a text."""

    text: str
    closed: bool


def _regions(text: str) -> Iterator[_Region]:
    """Yield the outermost objects and arrays of a text, in order."""
    start, position = 0, 0
    open_brackets: list[str] = []  # the expected closing brackets, innermost last
    while position < len(text):
        character = text[position]
        quoted = _QUOTED.match(text, position) if open_brackets else None
        position = quoted.end() if quoted else position + 1
        if character in _BRACKETS:
            start = start if open_brackets else position - 1
            open_brackets.append(_BRACKETS[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
            if not open_brackets:
                yield _Region(text[start:position], closed=True)
    if open_brackets:
        yield _Region(text[start:], closed=False)
