"""Parse streamed replies into text, reasoning and tool calls.

A call is JSON between two markers (`adafuse_llm.text.conversation`)::

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Some members leave the markers out. So a reply that is nothing but the JSON of calls, possibly in a
list or in code fences, is read as calls, too. Reasoning is text between ``<think>`` and
``</think>`` at the beginning of a reply. The chat template may have written the ``<think>``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from adafuse_llm.errors import short_list, short_repr
from adafuse_llm.results import Generation
from adafuse_llm.text.conversation import CALL_CLOSES, CALL_OPENS, Tool, map_json
from adafuse_llm.text.reasoning import REASONING_CLOSES, REASONING_OPENS
from adafuse_llm.text.stops import begun_size

CUT = ("length", "cancelled")
"""Finish reasons of replies that a limit or the user ended before the members did."""

MIN_MARKER = len("<tool")
"""At the end of a cut-off reply, this many characters of an opening marker, or more, are a call."""

HEAD = 32
"""A reply can be calls without markers only if its first `HEAD` characters have a call's key."""

_KEYS = {"name", "arguments"}
_FENCE = re.compile(r"(?:^|(?<=[}\]]))[ \t]*```[\w-]*[ \t]*$", re.MULTILINE)
_WRITTEN = re.compile(r'"name"\s*:\s*"[^"\n]*"\s*,\s*"arguments"\s*:')
HALF = re.compile("[\ud800-\udfff]")
"""A surrogate: one half of a character, such as an emoji, in UTF-16. UTF-8 cannot encode it."""
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NUMBER_AT_END = re.compile(r"\d[\d.eE+-]*\Z")
_OTHER_BRACKET = str.maketrans("]}", "}]")


@dataclass(frozen=True)
class Text:
    """Text for the user, as the members wrote it."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning, without its markers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call. Its tool may be unknown, and its arguments may violate the schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class InvalidToolCall:
    """A malformed or unfinished call.

    Attributes:
        name: the name of the tool; None if the call is not JSON or has no name.
        text: what the members wrote, without the markers.
        error: why the call is invalid.
        is_cut: whether a limit or the user ended the reply inside the call.
        is_closed: whether the call has its closing marker.
    """

    name: str | None
    text: str
    error: str
    is_cut: bool = False
    is_closed: bool = True


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call. After the last piece comes the whole call, valid or invalid.

    Attributes:
        number: the number of the call in the reply, from 0.
        name: the name of the tool in the first piece, and None in the others.
        arguments: the next part of the arguments' JSON. If the call is invalid, the last piece has
            a marker or a wrong bracket, so that no client completes and runs the call.
    """

    number: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class _OpenCall:
    """An unfinished call: the JSON of its arguments so far, and what would close this JSON."""

    name: str
    written: str
    closers: str


ParsedCall = ToolCall | InvalidToolCall
Part = Text | Reasoning | CallPiece | ToolCall | InvalidToolCall
_Read = Text | Reasoning | _OpenCall | ToolCall | InvalidToolCall

_KIND_AFTER: dict[str, type[Text | Reasoning | ToolCall]] = {
    CALL_OPENS: ToolCall,
    CALL_CLOSES: Text,
    REASONING_OPENS: Reasoning,
    REASONING_CLOSES: Text,
}
"""The kind of text that follows each marker."""


@dataclass
class ReplyDelta:
    """What the next text adds to a reply.

    Attributes:
        parts: text, reasoning, pieces of calls, and whole calls, in order.
        content, reasoning, calls: the text, the reasoning and the whole calls in `parts`.
        warnings: at the end of the reply, what is wrong with it and its calls.
    """

    parts: list[Part] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def cut_off(finish_reason: str | None, limit: str) -> str:
    """Return a text such as "max_tokens cut it off", or "" if nothing cut the reply off.

    The arguments are ``finish_reason`` and ``cut_by`` of a `Generation`.
    """
    if finish_reason not in CUT:
        return ""
    limit = limit.replace("max_new_tokens", "max_tokens")
    return f"{limit} cut it off" if limit else "it was stopped before its end"


class ReplyReader:
    """Reads one reply while it grows. It removes whitespace after reasoning and after calls.

    It holds back text that may be the beginning of a marker, and a reply that may be nothing but
    calls without markers. No tool should act twice: a call with the same name and arguments as an
    earlier one is left out, and so are all calls after it. A call that may still become equal to an
    earlier one is held back.

    Args:
        tools: the tools that the reply can call; if there are none, calls are text.
        parallel: whether to keep all calls of the reply; otherwise, only the first one.
        as_text: whether a malformed call becomes text and a cut-off call is left out, unless the
            reader has already returned pieces of the call.
        in_pieces: whether a call comes in pieces while members write it, and not as a whole at its
            closing marker. This needs members that follow `tool_grammar`.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        parallel: bool = True,
        as_text: bool = True,
        in_pieces: bool = False,
    ) -> None:
        self._tools = tools
        self._parallel = parallel
        self._as_text = as_text
        self._in_pieces = in_pieces
        self._kind: type[Text | Reasoning | ToolCall] | None = None  # None before the first text
        self._buffer = ""  # text of this kind that may contain the beginning of a marker
        self._may_reason = True  # until the first text
        self._held = ""  # text that may be calls without markers
        self._may_be_calls = bool(tools)
        self._at_start = False  # True while only whitespace has followed a call or reasoning
        self._text = ""  # all text so far
        self._calls: list[ParsedCall] = []
        self._keys: set[str] = set()
        self._repeated: ToolCall | None = None
        self._number = -1  # of the last call that was passed on
        self._begun: _OpenCall | None = None  # that call, as far as it was passed on

    def add(self, text: str, prefix: str = "", end: Generation | None = None) -> ReplyDelta:
        """Return what the next text adds to the reply.

        Args:
            text: the text.
            prefix: the reasoning that the chat templates opened before the reply, if any
                (`StreamEvent.reply_prefix`).
            end: the whole response, if this text is its last one.
        """
        if self._kind is None:
            self._kind = Reasoning if prefix else Text
        cut = "" if end is None else cut_off(end.finish_reason, end.cut_by)
        begun = self._buffer + text
        head = begun.lstrip()[: len(REASONING_OPENS)]
        may_reason = self._may_reason and REASONING_OPENS.startswith(head)
        if self._kind is Text and not (self._tools or may_reason):  # no marker can come any more
            parts: list[_Read] = [Text(begun)]
            self._buffer, self._may_reason = "", False
        else:
            parts = self._split(text)
            if end is not None:
                parts += self._ended(cut)
            elif self._in_pieces and self._kind is ToolCall:
                parts += _open_call(self._buffer)
            parts = [released for part in parts for released in self._released(part)]
            if end is not None and self._held:
                parts += self._without_markers(cut)
        shown = [each for part in parts for each in self._shown(part)]
        return ReplyDelta(
            shown,
            "".join(part.text for part in shown if isinstance(part, Text)),
            "".join(part.text for part in shown if isinstance(part, Reasoning)),
            [part for part in shown if isinstance(part, (ToolCall, InvalidToolCall))],
            [] if end is None else self._warnings(cut),
        )

    # Markers -----------------------------------------------------------------------------------

    def _split(self, text: str, *, is_last: bool = False) -> list[_Read]:
        """Add text to the buffer. Remove and return the parts that later text cannot change."""
        self._buffer += text
        parts: list[_Read] = []
        while first := self._first_marker(is_last=is_last):
            position, marker = first
            parts += self._take(position)
            self._buffer = self._buffer[len(marker) :]
            self._kind = _KIND_AFTER[marker]
        if self._kind is not ToolCall:
            parts += self._take(len(self._buffer) - begun_size(self._buffer, self._markers()))
        return parts

    def _ended(self, cut: str) -> list[_Read]:
        parts = self._split("", is_last=True)
        if self._kind is ToolCall:
            return [*parts, _unclosed(self._buffer, cut)]
        if cut and self._tools and self._kind is Text and CALL_OPENS.startswith(self._buffer):
            # a limit ended the reply inside an opening marker
            return [*parts, _unclosed("", cut)] if len(self._buffer) >= MIN_MARKER else parts
        return parts + self._take(len(self._buffer))

    def _first_marker(self, *, is_last: bool) -> tuple[int, str] | None:
        """Return position and text of the buffer's first marker that takes effect, or None.

        A string in a call's JSON may contain the closing marker, so a call ends at the first such
        marker after whole JSON. At the reply's end, a malformed call ends at its first such marker.
        """
        if self._kind is ToolCall:
            ends = [match.start() for match in re.finditer(CALL_CLOSES, self._buffer)]
            wholes = (end for end in ends if isinstance(_read_call(self._buffer[:end]), ToolCall))
            end = next(wholes, ends[0] if ends and is_last else None)
            return None if end is None else (end, CALL_CLOSES)
        places = [(self._buffer.find(marker), marker) for marker in self._markers()]
        return min((place for place in places if place[0] >= 0), default=None)

    def _markers(self) -> list[str]:
        if self._kind is Reasoning:
            return [REASONING_CLOSES]
        markers = [CALL_OPENS] if self._tools else []
        head = self._buffer.lstrip()[: len(REASONING_OPENS)]
        if self._may_reason and REASONING_OPENS.startswith(head):
            markers.append(REASONING_OPENS)
        return markers

    def _take(self, size: int) -> list[_Read]:
        head, self._buffer = self._buffer[:size], self._buffer[size:]
        if self._kind is ToolCall:
            return [_read_call(head)]
        if not head:
            return []
        if self._kind is Reasoning:
            return [Reasoning(head)]
        self._may_reason = self._may_reason and head.isspace()
        return [Text(head)]

    # Parts -------------------------------------------------------------------------------------

    def _released(self, part: _Read) -> list[_Read]:
        """Return the text held so far and then a part, unless it is text that may be calls."""
        if isinstance(part, Reasoning):
            return [part]
        if isinstance(part, Text):
            self._held += part.text
            self._may_be_calls = self._may_be_calls and _may_be_calls(self._held)
            if self._may_be_calls:
                return []
        self._may_be_calls = False
        held, self._held = Text(self._held), ""
        return [held] if isinstance(part, Text) else [held, part]

    def _without_markers(self, cut: str) -> list[_Read]:
        calls, problem = _bare_calls(self._held, self._tools)
        if cut and problem:
            return [InvalidToolCall(None, self._held, cut, is_cut=True)]
        return [*calls] or [Text(self._held)]

    def _shown(self, part: _Read) -> list[Part]:
        if isinstance(part, Text):
            part = Text(part.text.lstrip() if self._at_start else part.text)
            self._at_start = self._at_start and not part.text
            self._text += part.text
            return [part] if part.text else []
        self._at_start = True
        if isinstance(part, _OpenCall):
            return self._shown_open(part)
        return [part] if isinstance(part, Reasoning) else self._shown_call(part)

    def _shown_open(self, call: _OpenCall) -> list[Part]:
        begun = self._begun
        if begun is None:  # an equal call is left out
            calls = [each for each in self._calls if isinstance(each, ToolCall)]
            equal = [_as_json(each.arguments) for each in calls if each.name == call.name]
            if self._repeated or any(each.startswith(call.written) for each in equal):
                return []
        elif not call.written.startswith(begun.written):
            return []
        self._begun = call
        return self._pieces(call.name, call.written, begun)

    def _shown_call(self, call: ParsedCall) -> list[Part]:
        begun, self._begun = self._begun, None
        if isinstance(call, ToolCall):
            key, written = call_key(call.name, call.arguments), _as_json(call.arguments)
            if begun and (key in self._keys or not written.startswith(begun.written)):
                call = InvalidToolCall(call.name, written, "its arguments have a key twice")
            elif key in self._keys:
                self._repeated = self._repeated or call
            self._keys.add(key)
        if begun is None and (self._repeated or (self._calls and not self._parallel)):
            return []
        self._calls.append(call)
        if isinstance(call, InvalidToolCall):  # no client can complete this text, and run the tool
            written = f"{CALL_OPENS}{call.text}"
            if begun:
                written = begun.written + begun.closers.translate(_OTHER_BRACKET)
            elif self._as_text:
                closes = CALL_CLOSES if call.is_closed else ""
                return [] if call.is_cut else [Text(f"{written}{closes}")]
        return [*self._pieces(call.name or "", written, begun), call]

    def _pieces(self, name: str, written: str, begun: _OpenCall | None) -> list[Part]:
        if begun is None:
            self._number += 1
            return [CallPiece(self._number, name, written)]
        added = written[len(begun.written) :]
        return [CallPiece(self._number, None, added)] if added else []

    def _warnings(self, cut: str) -> list[str]:
        warnings = []
        if not (self._text.strip() or self._calls):
            warnings.append(": ".join(["the reply is empty", *filter(None, [cut])]))
        problems = (_problem(call, self._tools) for call in self._calls)
        warnings += [
            f"the reply has a tool call that is not valid: {problem}"
            for problem in problems
            if problem
        ]
        if self._repeated:
            warnings.append(
                f"the reply repeats a call of {self._repeated.name!r}, so the call runs once, and "
                "the calls after it are left out"
            )
        elif cut and self._calls and not warnings:
            warnings.append(f"the reply may lack calls: {cut}")
        problem = f"there is {CALL_CLOSES} in its text" if CALL_CLOSES in self._text else ""
        if self._tools and not self._calls:
            problem = problem or _bare_calls(self._text, self._tools)[1]
        if self._tools and problem and not warnings:
            warnings.append(f"the reply looks like a tool call and is none: {problem}")
        return warnings


def call_key(name: object, arguments: object) -> str:
    """Return a text that is the same for calls with the same name and arguments."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # the text of a malformed call
            arguments = json.loads(arguments or "{}")
    return json.dumps([name, arguments], sort_keys=True, default=repr)


def _may_be_calls(text: str) -> bool:
    """Return whether a reply that begins with `text` may be calls without markers."""
    begun = text.lstrip()
    keys = any(f'"{key}"' in begun[:HEAD] for key in _KEYS)
    return not begun or (begun[0] in "`[{" and (keys or len(begun) < HEAD))


def _bare_calls(text: str, tools: Sequence[Tool]) -> tuple[list[ToolCall], str]:
    """Read the calls in a whole reply that has no markers. Return them and "".

    If this fails, return no calls and the reason, or "" if the reply does not look like calls.
    """
    rest = _FENCE.sub("", text).strip()
    calls: list[ToolCall] = []
    while rest:
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
            value = read_json(rest[:end])
        except (ValueError, RecursionError) as error:  # no JSON, too many digits, or too deep
            is_call = calls or _WRITTEN.search(rest)
            return [], f"it is not the JSON of calls alone: {error}" if is_call else ""
        for written in value if isinstance(value, list) else [value]:
            call = _to_call(written, rest[:end])
            looks = isinstance(written, dict) and written.keys() >= _KEYS
            problem = _problem(call, tools)
            if looks and len(written) > len(_KEYS):
                problem = problem or "it has other keys"
            if problem or isinstance(call, InvalidToolCall):
                return [], problem if looks or calls else ""
            calls.append(call)
        rest = rest[end:].lstrip()
    return calls, ""


def _problem(call: ParsedCall, tools: Sequence[Tool]) -> str:
    """Return why a call cannot be executed, or "". Types of arguments are not checked."""
    if isinstance(call, InvalidToolCall):
        return call.error
    schemas = {tool.name: tool.parameters for tool in tools}
    if call.name not in schemas:
        names = short_list(list(schemas))
        return f"there is no tool {short_repr(call.name)}. The tools are: {names}"
    required = schemas[call.name].get("required")
    required = required if isinstance(required, (list, tuple)) else ()
    missing = [str(key) for key in required if key not in call.arguments]
    return f"the call of {call.name!r} lacks the arguments {short_list(missing)}" if missing else ""


def _unclosed(text: str, cut: str) -> ParsedCall:
    """Read a call that lacks its closing marker. It is valid if its JSON is whole."""
    call = _read_call(text[: len(text) - begun_size(text, [CALL_CLOSES])])
    if isinstance(call, ToolCall):
        return call
    error = cut or f"it is not closed by {CALL_CLOSES}"
    return InvalidToolCall(None, text, error, is_cut=bool(cut), is_closed=False)


def _read_call(text: str) -> ParsedCall:
    """Parse the text between the markers of a call, without repairing it."""
    try:
        return _to_call(read_json(text), text)
    except ValueError as error:
        return InvalidToolCall(None, text, f"the call is not JSON: {error}")


def _to_call(call: Any, text: str) -> ParsedCall:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return InvalidToolCall(None, text, 'the call is not an object with a "name" that is text')
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return InvalidToolCall(name, text, 'the call has no "arguments" that are an object')
    return ToolCall(name, arguments)


def _open_call(text: str) -> list[_OpenCall]:
    """Read an unfinished call. Return it in a list, which is empty until the arguments begin."""
    whole = _NUMBER_AT_END.sub("", text)  # more digits could follow
    with suppress(ValueError):  # more than JSON, or a number that is too large
        call = from_json(whole, allow_partial="trailing-strings", allow_inf_nan=False)
        match [*call.items()] if isinstance(call, dict) else None:
            case [("name", str(name)), ("arguments", dict(arguments))]:
                closers = _closers(arguments)
                return [_OpenCall(name, _as_json(arguments).removesuffix(closers), closers)]
    return []


def _closers(value: Any) -> str:
    """Return the brackets and quotes that close the JSON of an unfinished value."""
    if not isinstance(value, (dict, list)):
        return '"' if isinstance(value, str) else ""
    last = [*(value.values() if isinstance(value, dict) else value)][-1:]
    return "".join(map(_closers, last)) + _as_json(value)[-1]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_json(text: str) -> Any:
    """Parse standard JSON, without NaN and Infinity. The result can be written as JSON again.

    Half a character, such as half an emoji, becomes U+FFFD.

    Raises:
        ValueError: `text` is not JSON, its nesting is too deep, or a number is too large.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if _HALF_ESCAPE.search(text):
            value = map_json(value, lambda text: HALF.sub("\ufffd", text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no number of JSON, or too large")
    return value
