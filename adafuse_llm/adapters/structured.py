"""Structured output: what members are told to write, and the JSON that they wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from adafuse_llm.adapters.reply import REASONING_CLOSES, ReplyParser, Text, read_json
from adafuse_llm.errors import InvalidInputError

_FENCED = re.compile(r"```\w*\s*\n(.*?)\n?\s*```", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)', re.DOTALL)
_BRACKETS = {"{": "}", "[": "]"}


def schema_instructions(schema: Mapping[str, Any]) -> str:
    """What members are told to write, for the end of the system message.

    Args:
        schema: a JSON schema of the reply.

    Raises:
        InvalidInputError: it cannot be written as JSON.
    """
    try:
        compact = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the schema cannot be written as JSON: {error}") from error
    return (
        "Reply with one JSON value that fits this JSON schema, and with nothing else: no "
        f"explanation, no code fence, not the schema itself.\n{compact}"
    )


def find_json(text: str) -> Any:
    """The JSON value of a reply, without reasoning, code fences and words around it.

    If the reply is not JSON as a whole, the longest object or array in it counts; what is inside
    of one never does.

    Raises:
        ValueError: there is none, it is cut off, or it is malformed; with what is wrong.
    """
    answer = _answer(text).strip()
    fenced = _FENCED.fullmatch(answer)
    for whole in (text, answer, *(fenced.groups() if fenced else ())):
        try:
            return read_json(whole)
        except ValueError:
            continue
    regions = list(_regions(answer))
    if not regions:
        begins = f"it begins with {answer[:40]!r}" if answer else "it is empty"
        raise ValueError(f"the reply holds no JSON object or array; {begins}")
    region = max(regions, key=lambda region: len(region.text))
    if not region.closed:
        raise ValueError(f"the JSON is cut off: it ends with {region.text[-40:]!r}")
    try:
        return read_json(region.text)
    except ValueError as error:
        raise ValueError(f"the JSON is malformed: {error}") from None


def correction(error: str) -> str:
    """What the user says to a reply that cannot be used, so that the next one can."""
    return (
        f"This reply cannot be used: {error}\n"
        "Reply with the corrected JSON value, and with nothing else."
    )


def begun_json(text: str) -> str:
    """The JSON in a reply that is still being written, as far as it goes: the longest object or
    array outside of reasoning, closed or not. Empty while there is none.
    """
    regions = (region.text for region in _regions(_answer(text)))
    return max(regions, key=len, default="")


class _Region(NamedTuple):
    """What stands in brackets that are in no others."""

    start: int
    text: str
    closed: bool

    def holds(self, place: int) -> bool:
        """Whether `place` is in this region, and the region is JSON."""
        if not self.start < place < self.start + len(self.text):
            return False
        try:
            read_json(self.text)
        except ValueError:
            return False
        return True


def _answer(text: str) -> str:
    """The reply without reasoning, whose first marker may have been a part of the prompt."""
    parser = ReplyParser()
    parts = [*parser.feed(text), *parser.close()]
    answer = "".join(part.text for part in parts if isinstance(part, Text))
    place = answer.rfind(REASONING_CLOSES)
    if place < 0 or any(region.holds(place) for region in _regions(answer)):
        return answer
    return answer[place + len(REASONING_CLOSES) :]


def _regions(text: str) -> Iterator[_Region]:
    start, place = 0, 0
    missing: list[str] = []  # closing brackets, the innermost last
    while place < len(text):
        character = text[place]
        quoted = _QUOTED.match(text, place) if missing else None
        place = quoted.end() if quoted else place + 1
        if character in _BRACKETS:
            start = start if missing else place - 1
            missing.append(_BRACKETS[character])
        elif missing and character == missing[-1]:
            missing.pop()
            if not missing:
                yield _Region(start, text[start:place], closed=True)
    if missing:
        yield _Region(start, text[start:], closed=False)
