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
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from adafuse_llm.adapters.bare_calls import (
    NotCallsError,
    call_problem,
    may_be_calls,
    mentions_call,
    read_calls,
)
from adafuse_llm.reasoning import REASONING_CLOSES, REASONING_OPENS, open_reasoning
from adafuse_llm.results import StreamEvent
from adafuse_llm.text.conversation import CALL_CLOSES, CALL_OPENS, Tool

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


NOT_CLOSED = f"it is not closed by {CALL_CLOSES}"


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
        name: the name of the tool, if the call has one.
        text: everything between the markers, or what the members wrote of it.
        error: why the call is invalid.
        is_cut: whether a limit ended the reply inside the call.
    """

    name: str | None
    text: str
    error: str
    is_cut: bool = False

    @property
    def written(self) -> str:
        """The call with its markers."""
        return f"{CALL_OPENS}{self.text}{'' if self.error == NOT_CLOSED else CALL_CLOSES}"


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


CUT = {
    "length": "max_tokens or the context window cut it off",
    "cancelled": "it was stopped before its end",
}
"""The finish reasons of replies that end before the members end them, and what happened."""

HALF = re.compile("[\ud800-\udfff]")
"""Half of a character in UTF-16, such as half an emoji, which cannot be encoded."""

MIN_CUT_MARKER = len("<tool")
"""Characters of an opening marker that are taken for it at the end of a reply that was cut."""


class ReplyParser:
    """An incremental parser of one reply.

    The parts contain the whole reply except the markers. The size of the pieces passed to `feed`
    affects only where text is split into parts. The parser buffers a call until its closing marker
    arrives. A marker in a JSON string does not close the call, unless the string never ends. The
    parser also buffers text that may be the beginning of a marker.

    Args:
        tools: whether to recognize calls; otherwise they are text.
        prefix: text with which the chat templates began the reply (`StreamEvent.reply_prefix`). If
            it opens reasoning, the reply begins inside the reasoning.
        calls_forbidden: whether a grammar keeps the reply from opening a call. The beginning of an
            opening marker at the end of the reply is then dropped, as far as `close` says.
    """

    def __init__(
        self,
        *,
        tools: bool = False,
        prefix: str = "",
        calls_forbidden: bool = False,
    ) -> None:
        self._tools = tools
        self._calls_forbidden = calls_forbidden
        self._may_reason = True  # until the first text
        self._kind: type[Text | Reasoning | ToolCall] = (
            Reasoning if open_reasoning(prefix) else Text
        )
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

    @property
    def open_call(self) -> str | None:
        """The text of the call that has begun and is not complete; None outside of calls."""
        return self._buffer if self._kind is ToolCall else None

    def close(self, cut: str = "") -> list[Part]:
        """End the reply; return the parts that are still buffered.

        Args:
            cut: what cut the reply off, if anything did. The beginning of an opening marker is then
                dropped, and most of the marker counts as the marker. Otherwise, both are text, but
                if calls are forbidden, most of the marker is dropped.
        """
        self._complete = True
        parts = self.feed("")
        is_most = len(self._buffer) >= MIN_CUT_MARKER
        may_call = self._kind is Text and (self._tools or self._calls_forbidden)
        if may_call and CALL_OPENS.startswith(self._buffer):
            if cut and is_most and self._tools:
                self._kind = ToolCall
            if cut or (is_most and self._calls_forbidden):
                self._buffer = ""
        if self._kind is not ToolCall:
            return parts + self._take(len(self._buffer))
        self._kind, rest, self._buffer = Text, self._buffer, ""
        return [*parts, _unclosed(rest, cut)]

    def _take(self, size: int) -> list[Part]:
        """Remove the first `size` characters from the buffer; return them as parts."""
        head, self._buffer = self._buffer[:size], self._buffer[size:]
        if self._kind is ToolCall:
            return [_read_call(head)]
        if not head:
            return []
        if self._kind is Reasoning:
            return [Reasoning(head)]
        self._may_reason = self._may_reason and head.isspace()
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
        is_forbidden = self._calls_forbidden and self._kind is Text
        return max(
            (
                length
                for marker in [*self._markers(), *[CALL_OPENS] * is_forbidden]
                for length in range(1, min(len(marker), size + 1))
                if self._buffer.endswith(marker[:length])
                and self._is_valid_at(marker, size - length)
            ),
            default=0,
        )

    def _markers(self) -> list[str]:
        if self._kind is Reasoning:
            return [REASONING_CLOSES]
        return [CALL_OPENS] * self._tools + [REASONING_OPENS] * self._may_reason

    def _is_valid_at(self, marker: str, position: int) -> bool:
        """Return whether the marker takes effect at `position`. Reasoning must precede all text."""
        return marker != REASONING_OPENS or not self._buffer[:position].strip()


@dataclass
class ReplyDelta:
    """What the next text adds to a reply.

    Attributes:
        parts: text, reasoning, and calls that are complete now, in order.
        warnings: at the end of the reply, what is wrong with it and its calls.
    """

    parts: list[Part] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The text of all parts."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        """The reasoning of all parts, without its markers."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[ToolCall | InvalidToolCall]:
        """The calls of all parts."""
        return [part for part in self.parts if isinstance(part, (ToolCall, InvalidToolCall))]


class ReplyReader:
    """A reader of one reply. It removes whitespace after reasoning and after calls.

    If the whole reply is the JSON of calls without markers (`adafuse_llm.adapters.bare_calls`), it
    becomes calls at its end. The reader holds back text that begins as such JSON does, perhaps in a
    code fence.

    Args:
        tools: the tools that the reply can call; if there are none, calls are text.
        parallel: whether to keep all calls of the reply; otherwise, only the first one.
        calls_forbidden: as for `ReplyParser`.
        completes: whether to show text with which the engine completed a reply that was cut off.
        as_text: whether malformed calls are text, and nothing is left of a call that was cut off.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        parallel: bool = True,
        calls_forbidden: bool = False,
        completes: bool = True,
        as_text: bool = False,
    ) -> None:
        self._tools = tools
        self._completes = completes
        self._as_text = as_text
        self._calls_forbidden = calls_forbidden
        self._parallel = parallel
        self._parser: ReplyParser | None = None
        self._calls: list[ToolCall | InvalidToolCall] = []
        self._at_start = False  # True while only whitespace has followed a call or reasoning
        self._held = ""  # text that may be calls without markers
        self._may_be_calls = bool(tools)
        self._text = ""

    def read(self, event: StreamEvent) -> ReplyDelta:
        """Return what an event adds to the reply."""
        whole = event.generation
        if whole is None:
            return self.add(event.text, event.reply_prefix)
        return self.add(event.text, event.reply_prefix, whole.finish_reason, whole.closing)

    def add(
        self, text: str, prefix: str = "", finish_reason: str | None = None, closing: str = ""
    ) -> ReplyDelta:
        """Return what the next text adds to the reply.

        Args:
            text: the text.
            prefix: text with which the chat templates began the reply.
            finish_reason: why the reply ends after this text; None if it goes on.
            closing: the end of the text that the engine made up (`Generation.closing`). It
                completes text, but never a call.
        """
        if self._parser is None:
            self._parser = ReplyParser(
                tools=bool(self._tools), prefix=prefix, calls_forbidden=self._calls_forbidden
            )
        parts = self._parser.feed(text.removesuffix(closing))
        cut = CUT.get(finish_reason or "", "")
        if finish_reason is not None and not closing:
            parts += self._parser.close(cut)
        if self._tools:
            parts = list(
                self._with_bare_calls(parts, finish_reason is not None, "" if closing else cut)
            )
        if closing:
            parts += self._closed(closing, cut)
        delta = ReplyDelta([shown for part in parts for shown in self._shown(part)])
        if finish_reason is not None:
            delta.warnings = self._warnings(cut, closing)
        return delta

    def unfinished(self) -> tuple[str, str] | None:
        """Return the name and the JSON of the arguments so far of a call that has begun.

        It is None if no call with markers has begun, or before its arguments begin.
        """
        text = None if self._parser is None else self._parser.open_call
        if text is None or (self._calls and not self._parallel):
            return None
        name, arguments = _begun(text)
        return None if name is None or arguments[:1] != "{" else (name, arguments)

    def _closed(self, closing: str, cut: str) -> list[Part]:
        """Return the parts of a text that closes the reply, and the call that it cuts off, if any.

        A call is whole only if the members wrote all of its JSON.
        """
        assert self._parser is not None
        begun = self._parser.open_call
        parts = [*self._parser.feed(closing), *self._parser.close()]
        texts: list[Part] = [part for part in parts if isinstance(part, (Text, Reasoning))]
        cut_call = [_unclosed(begun or "", cut)] if len(texts) < len(parts) else []
        return [*cut_call, *(texts if self._completes else ())]

    def _shown(self, part: Part) -> list[Part]:
        """Remember a part, and return what callers get of it."""
        if isinstance(part, Text):
            text = part.text.lstrip() if self._at_start else part.text
            self._at_start = self._at_start and not text
            self._text += text
            return [Text(text)] if text else []
        self._at_start = True
        if isinstance(part, Reasoning):
            return [part]
        if self._calls and not self._parallel:
            return []
        self._calls.append(part)
        if isinstance(part, ToolCall) or not self._as_text:
            return [part]
        return [] if part.is_cut else [Text(part.written)]

    def _with_bare_calls(self, parts: Iterable[Part], is_last: bool, cut: str) -> Iterator[Part]:
        """Hold text back while the reply can be calls without markers, and yield these calls."""
        for part in parts:
            if not self._may_be_calls or isinstance(part, Reasoning):
                yield part
            elif isinstance(part, Text):
                self._held += part.text
                yield from self._released()
            else:
                self._may_be_calls = False
                yield from [*self._let_go(), part]
        if is_last and self._held:
            calls, problem = _bare_calls(self._held, self._tools)
            if cut and problem and mentions_call(self._held):
                yield InvalidToolCall(None, self._held, cut, is_cut=True)
            else:
                yield from calls or self._let_go()

    def _released(self) -> list[Part]:
        """Return the held text as parts if it cannot be calls whatever follows."""
        self._may_be_calls = may_be_calls(self._held)
        return [] if self._held.strip() and self._may_be_calls else self._let_go()

    def _let_go(self) -> list[Part]:
        text, self._held = self._held, ""
        return [Text(text)] if text else []

    def _warnings(self, cut: str, closing: str) -> list[str]:
        """Return what is wrong with the whole reply and its calls."""
        warnings = []
        if closing and self._text.endswith(closing):
            warnings.append(f"the reply is not whole: {cut}, and the engine added {closing!r:.100}")
        if not (self._text.strip() or self._calls):
            warnings.append(": ".join(["the reply is empty", *filter(None, [cut])]))
        for call in self._calls:
            problem = call.error if isinstance(call, InvalidToolCall) else ""
            if isinstance(call, ToolCall):
                given = {"name": call.name, "arguments": call.arguments}
                problem = call_problem(given, self._tools)
            warnings += [f"the reply has a tool call that is not valid: {problem}"] * bool(problem)
        problem = "" if self._calls or not self._tools else _bare_calls(self._text, self._tools)[1]
        if problem:
            warnings.append(f"the reply looks like a tool call and is none: {problem}")
        return warnings


def _bare_calls(text: str, tools: Sequence[Tool]) -> tuple[list[ToolCall], str]:
    """Return the calls that a whole reply without markers is.

    If there are none, also return why; this is empty if the reply does not look like a call.
    """
    try:
        calls = [_read_call(each) for each in read_calls(text, tools)]
    except NotCallsError as error:
        return [], str(error) or "it also has other text" * mentions_call(text)
    problem = next((call.error for call in calls if isinstance(call, InvalidToolCall)), "")
    return [] if problem else [call for call in calls if isinstance(call, ToolCall)], problem


def _unclosed(text: str, cut: str) -> ToolCall | InvalidToolCall:
    """Read a call without its closing marker. If its JSON is whole, the call is.

    Args:
        text: the call, possibly with the beginning of the marker.
        cut: what cut the reply off, if anything did.
    """
    head, _, marker = text.rpartition("<")
    call = _read_call(head if CALL_CLOSES.startswith(f"<{marker}") else text)
    if isinstance(call, ToolCall):
        return call
    return InvalidToolCall(_begun(text)[0], text, cut or NOT_CLOSED, is_cut=bool(cut))


def _begun(text: str) -> tuple[str | None, str]:
    """Return the name and the JSON of the arguments of a call as far as it has them."""
    head, _, arguments = text.partition(', "arguments": ')
    try:
        name = read_json(head + "}")["name"]
    except (ValueError, KeyError, TypeError):
        name = None
    return name if isinstance(name, str) else None, arguments


def _read_call(text: str) -> ToolCall | InvalidToolCall:
    """Parse the text between the markers of a call, without repairing it."""
    try:
        call = read_json(text)
        if HALF.search(written := json.dumps(call, ensure_ascii=False)):
            call = read_json(HALF.sub("\ufffd", written))
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
    """Parse standard JSON, which has no NaN or Infinity. All values can be written as JSON again.

    Raises:
        ValueError: `text` is not JSON, or a number is too large.
    """
    try:
        return json.loads(text, parse_constant=_reject, parse_float=_finite, parse_int=_short)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _short(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the number {text[:20]}... has too many digits") from None


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
