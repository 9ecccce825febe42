"""Parse streamed replies into text, reasoning and tool calls.

A call is JSON between two markers. `adafuse_llm.text.conversation` describes this format to the
members::

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Reasoning is text between ``<think>`` and ``</think>`` at the beginning of a reply. A chat template
may write the opening marker.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

from adafuse_llm.reasoning import REASONING_CLOSES, REASONING_OPENS, open_reasoning
from adafuse_llm.results import StreamEvent
from adafuse_llm.text.conversation import CALL_CLOSES, CALL_OPENS

__all__ = [
    "CALL_CLOSES",
    "CALL_OPENS",
    "REASONING_CLOSES",
    "REASONING_OPENS",
    "InvalidToolCall",
    "Part",
    "Reasoning",
    "ReplyDelta",
    "ReplyParser",
    "ReplyReader",
    "Text",
    "ToolCall",
    "read_json",
]


@dataclass(frozen=True)
class Text:
    """Text for the user, unchanged."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning, without its markers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call.

    Attributes:
        name: the name of the tool. A tool with this name may not exist.
        arguments: the arguments, not validated against a schema.
        text: everything between the markers.
    """

    name: str
    arguments: dict[str, Any]
    text: str


@dataclass(frozen=True)
class InvalidToolCall:
    """A malformed or unfinished call.

    Attributes:
        name: the name of the tool, if the JSON is well-formed and has a name.
        text: everything between the markers, or up to the end of the reply.
        error: why the call is invalid.
    """

    name: str | None
    text: str
    error: str


Part = Text | Reasoning | ToolCall | InvalidToolCall

_STRING_OR_CLOSES = re.compile(
    r'"(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*(?:"|(?P<unfinished>\\?\Z))'
    rf"|(?P<closes>{re.escape(CALL_CLOSES)})"
)
"""A JSON string in a call, or the marker that closes the call. A line break ends no JSON string."""


_KIND_AFTER: dict[str, type[Text | Reasoning | ToolCall]] = {
    CALL_OPENS: ToolCall,
    CALL_CLOSES: Text,
    REASONING_OPENS: Reasoning,
    REASONING_CLOSES: Text,
}
"""The kind of text that follows each marker."""


class ReplyParser:
    """An incremental parser of one reply.

    The parts contain the whole reply except the markers. The size of the pieces passed to `feed`
    affects only where text is split into parts. The parser buffers a call until its closing marker
    arrives. A marker in a JSON string does not close the call, unless the string never ends. The
    parser also buffers text that may be the beginning of a marker.

    Args:
        tools: whether to recognize calls; otherwise they are text.
        reasoning: whether to recognize reasoning; otherwise it is text.
        prefix: text with which the chat templates began the reply (`StreamEvent.reply_prefix`). If
            it opens reasoning, the reply begins inside the reasoning.
    """

    def __init__(self, *, tools: bool = False, reasoning: bool = True, prefix: str = "") -> None:
        self._tools = tools
        self._reasoning = reasoning  # becomes False after the first text
        is_open = reasoning and bool(open_reasoning(prefix))
        self._kind: type[Text | Reasoning | ToolCall] = Reasoning if is_open else Text
        self._buffer = ""
        self._complete = False

    def feed(self, text: str) -> list[Part]:
        """Add `text` to the reply; return the parts that later text cannot change."""
        self._buffer += text
        parts: list[Part] = []
        while first := self._first_marker():
            position, marker = first
            parts += self._take(position)
            self._buffer = self._buffer[len(marker) :]
            self._kind = _KIND_AFTER[marker]
        if self._kind is not ToolCall:
            parts += self._take(len(self._buffer) - self._partial_marker_size())
        return parts

    def close(self) -> list[Part]:
        """End the reply; return the parts that are still buffered."""
        self._complete = True
        parts = self.feed("")
        if self._kind is not ToolCall:
            return parts + self._take(len(self._buffer))
        self._kind, rest, self._buffer = Text, self._buffer, ""
        return [*parts, InvalidToolCall(None, rest, f"the call is not closed by {CALL_CLOSES}")]

    def _take(self, size: int) -> list[Part]:
        """Remove the first `size` characters from the buffer; return them as parts."""
        head, self._buffer = self._buffer[:size], self._buffer[size:]
        if self._kind is ToolCall:
            return [_read_call(head)]
        if not head:
            return []
        if self._kind is Reasoning:
            return [Reasoning(head)]
        self._reasoning = self._reasoning and head.isspace()
        return [Text(head)]

    def _first_marker(self) -> tuple[int, str] | None:
        """Return the position and text of the first marker in the buffer that takes effect."""
        if self._kind is ToolCall:
            position = self._call_end()
            return None if position < 0 else (position, CALL_CLOSES)
        positions = ((self._buffer.find(marker), marker) for marker in self._markers())
        return min(
            (
                (position, m)
                for position, m in positions
                if position >= 0 and self._is_valid_at(m, position)
            ),
            default=None,
        )

    def _call_end(self) -> int:
        """Return the position of the marker that closes the call, or -1."""
        for match in _STRING_OR_CLOSES.finditer(self._buffer):
            if match["closes"]:
                return match.start()
            if match["unfinished"] is not None:
                break
        return self._buffer.find(CALL_CLOSES) if self._complete else -1

    def _partial_marker_size(self) -> int:
        """Return how many characters at the buffer's end may be the beginning of a marker."""
        size = len(self._buffer)
        return max(
            (
                length
                for marker in self._markers()
                for length in range(1, min(len(marker), size + 1))
                if self._buffer.endswith(marker[:length])
                and self._is_valid_at(marker, size - length)
            ),
            default=0,
        )

    def _markers(self) -> list[str]:
        if self._kind is Reasoning:
            return [REASONING_CLOSES]
        return [CALL_OPENS] * self._tools + [REASONING_OPENS] * self._reasoning

    def _is_valid_at(self, marker: str, position: int) -> bool:
        """Return whether the marker takes effect at `position`. Reasoning must precede all text."""
        return marker != REASONING_OPENS or not self._buffer[:position].strip()


@dataclass
class ReplyDelta:
    """What an event adds to a reply.

    Attributes:
        content: text for the user.
        reasoning: reasoning.
        calls: calls that are complete now.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall | InvalidToolCall] = field(default_factory=list)


class ReplyReader:
    """A reader of the events of one reply. It removes whitespace after reasoning and after calls.

    Args:
        tools: whether to recognize calls.
        parallel: whether to keep all calls of the reply; otherwise, only the first one.
    """

    def __init__(self, *, tools: bool, parallel: bool = True) -> None:
        self._tools = tools
        self._parallel = parallel
        self._parser: ReplyParser | None = None
        self._has_call = False
        self._at_start = False  # True while only whitespace has followed a call or reasoning

    def read(self, event: StreamEvent) -> ReplyDelta:
        """Return what the next event adds to the reply."""
        delta = ReplyDelta()
        for part in self._parts(event):
            if isinstance(part, Text):
                text = part.text.lstrip() if self._at_start else part.text
                self._at_start = self._at_start and not text
                delta.content += text
                continue
            self._at_start = True
            if isinstance(part, Reasoning):
                delta.reasoning += part.text
            elif self._parallel or not self._has_call:
                self._has_call = True
                delta.calls.append(part)
        return delta

    def _parts(self, event: StreamEvent) -> list[Part]:
        if self._parser is None:
            self._parser = ReplyParser(tools=self._tools, prefix=event.reply_prefix)
        parts = self._parser.feed(event.text)
        return parts if event.generation is None else [*parts, *self._parser.close()]


def _read_call(text: str) -> ToolCall | InvalidToolCall:
    """Parse the text between the markers of a call, without repairing it."""
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
    """Parse standard JSON, which has no NaN or Infinity.

    A number that is too large for Python becomes the largest float, or an integer of that size, so
    all values can be written as JSON again.

    Raises:
        ValueError: `text` is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_reject, parse_float=_to_float, parse_int=_to_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _to_float(text: str) -> float:
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _to_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # more digits than Python converts
        return int(_to_float(text))


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
