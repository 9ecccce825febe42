"""Replies taken apart while they stream: text, reasoning, calls of tools.

A call is JSON between two markers, as `adafuse_llm.adapters.conversation` shows it to members::

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Reasoning stands between ``<think>`` and ``</think>`` at the beginning of a reply.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
REASONING_OPENS, REASONING_CLOSES = "<think>", "</think>"


@dataclass(frozen=True)
class Text:
    """What is meant for the reader, exactly as written."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What a member wrote to itself, without the markers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call.

    Attributes:
        name: the tool's name; whether there is such a tool is not checked.
        arguments: its arguments, not checked against a schema.
        text: all that stands between the markers.
    """

    name: str
    arguments: dict[str, Any]
    text: str


@dataclass(frozen=True)
class InvalidToolCall:
    """A call that is malformed, or was not finished.

    Attributes:
        name: the tool's name, where the JSON is well-formed and has one.
        text: all that stands between the markers, or to the end of the reply.
        error: what is wrong with it.
    """

    name: str | None
    text: str
    error: str


Part = Text | Reasoning | ToolCall | InvalidToolCall


_AFTER: dict[str, type[Text | Reasoning | ToolCall]] = {
    CALL_OPENS: ToolCall,
    CALL_CLOSES: Text,
    REASONING_OPENS: Reasoning,
    REASONING_CLOSES: Text,
}
"""What is written after each marker."""


class ReplyParser:
    """Takes a reply apart as it is written. However it is cut into pieces, the parts are the same
    but for where texts are cut, and hold all of it but the markers. Text that may be the beginning
    of a marker is held back, and so is a call until it is closed.

    Args:
        tools: whether to look for calls; otherwise they are text.
        reasoning: whether to look for reasoning; otherwise it is text.
    """

    def __init__(self, *, tools: bool = False, reasoning: bool = True) -> None:
        self._tools = tools
        self._reasoning = reasoning  # until text is written
        self._kind: type[Text | Reasoning | ToolCall] = Text
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """The parts, or further pieces of texts, that `text` completes."""
        self._held += text
        parts: list[Part] = []
        while found := self._first_marker():
            place, marker = found
            parts += self._take(place)
            self._held = self._held[len(marker) :]
            self._kind = _AFTER[marker]
        if self._kind is not ToolCall:
            parts += self._take(len(self._held) - self._begun())
        return parts

    def close(self) -> list[Part]:
        """What was held back, as the reply has ended."""
        if self._kind is not ToolCall:
            return self._take(len(self._held))
        self._kind, held, self._held = Text, self._held, ""
        return [InvalidToolCall(None, held, f"the call is not closed by {CALL_CLOSES}")]

    def _take(self, size: int) -> list[Part]:
        """The first `size` characters as parts of the current kind."""
        head, self._held = self._held[:size], self._held[size:]
        if self._kind is ToolCall:
            return [_read_call(head)]
        if not head:
            return []
        if self._kind is Reasoning:
            return [Reasoning(head)]
        self._reasoning = self._reasoning and head.isspace()
        return [Text(head)]

    def _first_marker(self) -> tuple[int, str] | None:
        """The next marker that means something here, and where it stands."""
        places = ((self._held.find(marker), marker) for marker in self._markers())
        return min(
            ((place, m) for place, m in places if place >= 0 and self._may_stand(m, place)),
            default=None,
        )

    def _begun(self) -> int:
        """Characters at the end that may be the beginning of a marker."""
        size = len(self._held)
        return max(
            (
                length
                for marker in self._markers()
                for length in range(1, min(len(marker), size + 1))
                if self._held.endswith(marker[:length]) and self._may_stand(marker, size - length)
            ),
            default=0,
        )

    def _markers(self) -> list[str]:
        if self._kind is ToolCall:
            return [CALL_CLOSES]
        if self._kind is Reasoning:
            return [REASONING_CLOSES]
        return [CALL_OPENS] * self._tools + [REASONING_OPENS] * self._reasoning

    def _may_stand(self, marker: str, place: int) -> bool:
        """Whether a marker counts at `place`: reasoning comes before all text."""
        return marker != REASONING_OPENS or not self._held[:place].strip()


def _read_call(text: str) -> ToolCall | InvalidToolCall:
    """The call that stands between two markers; never a repaired one."""
    try:
        call = read_json(text)
    except ValueError as error:
        return InvalidToolCall(None, text, f"the call is not JSON: {error}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return InvalidToolCall(None, text, 'the call is not an object with a "name" that is text')
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return InvalidToolCall(name, text, 'the call has no "arguments" that are an object')
    return ToolCall(name, arguments, text)


def read_json(text: str) -> Any:
    """JSON as the standard has it: Python's NaN and Infinity are none.

    Raises:
        ValueError: `text` is not JSON, with what is wrong.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
