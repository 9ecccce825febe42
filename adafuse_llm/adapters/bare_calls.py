"""Tool calls without markers: replies that consist of nothing but the JSON of calls.

Some members leave the markers of the common form out. `read_calls` reads such a reply if the whole
of it is calls of given tools: one JSON object or several, alone or in a list, with or without code
fences. For example::

    ```json
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    ```
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adafuse_llm.errors import short_list, short_repr
from adafuse_llm.text.chat import Tool

KEYS = ("name", "arguments")
"""The keys of a call."""

OPENINGS = ("{", "[", "`")
"""The first characters of replies that can be calls without markers."""

_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"(?P<unfinished>`{1,2}\Z|```[\w-]*[ \t]*\Z)|```[\w-]*[ \t]*\n")
_WRITTEN = re.compile(r'"name"\s*:\s*"[^"\n]*"\s*,\s*"arguments"\s*:')
_DECODER = json.JSONDecoder()
_CUT = 6
"""Characters that the last token of unfinished JSON can have before it is an error, as ``false``
and ``\\u0041`` have."""


class NotCallsError(ValueError):
    """A text is not calls of the tools, whatever follows. The message is empty if it never was."""


def mentions_call(text: str) -> bool:
    """Return whether a text contains what looks like the JSON of a call."""
    return _WRITTEN.search(text) is not None


def call_problem(call: Any, tools: Iterable[Tool]) -> str:
    """Return why JSON is no valid call of a tool, or "" if it is one.

    A call has the name of a tool, and arguments that are an object with all required properties.
    Types of arguments are not checked.
    """
    schemas: dict[str, Mapping[str, Any]] = {tool.name: tool.parameters for tool in tools}
    if not isinstance(call, Mapping) or set(call) != set(KEYS):
        return "it is not an object with a name and arguments"
    name, arguments = call["name"], call["arguments"]
    if name not in schemas:
        names = short_list(list(schemas))
        return f"there is no tool {short_repr(name)}. The tools are: {names}"
    if not isinstance(arguments, Mapping):
        return f"the arguments of {name!r} are not an object"
    required = schemas[name].get("required")
    required = required if isinstance(required, (list, tuple)) else ()
    if missing := [str(key) for key in required if key not in arguments]:
        return f"the call of {name!r} lacks the arguments {short_list(missing)}"
    return ""


def read_calls(text: str, tools: Sequence[Tool]) -> list[str] | None:
    """Return the JSON of each call if a reply is nothing but calls of the tools.

    Args:
        text: the beginning of a reply.
        tools: the tools.

    Returns:
        The calls, in order. None if `text` ends inside a call, or before the first one.

    Raises:
        NotCallsError: the reply is not calls of the tools, whatever follows `text`.
    """
    calls: list[str] = []
    in_fence, in_list, needs_comma = False, False, False
    at = _skip(text, 0)
    while at < len(text):
        character = text[at]
        if in_fence and text.startswith("```", at):
            at, in_fence = at + 3, False
        elif not in_list and (fence := _FENCE.match(text, at)):
            if fence["unfinished"]:
                return None
            at, in_fence = fence.end(), True
        elif character == "[" and not in_list and not calls:
            at, in_list = at + 1, True
        elif character == "]" and in_list and needs_comma:
            at, in_list, needs_comma = at + 1, False, False
        elif character == "," and in_list and needs_comma:
            at, needs_comma = at + 1, False
        elif character == "{" and not needs_comma:
            end = _end_of_call(text, at, tools)
            if end is None:
                return None
            calls.append(text[at:end])
            at, needs_comma = end, in_list
        else:
            raise NotCallsError("it also has other text" if calls else "")
        at = _skip(text, at)
    return None if in_list or not calls else calls


def _end_of_call(text: str, start: int, tools: Sequence[Tool]) -> int | None:
    """Return the end of the call that begins at `start`; None if `text` ends inside it.

    Raises:
        NotCallsError: it is not a call of the tools.
    """
    try:
        call, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if _is_cut(error) and _may_be_call(text, start, [tool.name for tool in tools]):
            return None
        is_call = mentions_call(text[start:])
        raise NotCallsError(f"it is not JSON: {error}" if is_call else "") from None
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise NotCallsError(f"it is not JSON: {error}") from None
    if problem := call_problem(call, tools):
        raise NotCallsError(problem if set(call) >= set(KEYS) else "")
    return end


def _is_cut(error: json.JSONDecodeError) -> bool:
    """Return whether JSON is wrong only because it ends too early."""
    return error.msg.startswith("Unterminated") or len(error.doc) - error.pos < _CUT


def _may_be_call(text: str, start: int, names: Sequence[str]) -> bool:
    """Return whether an unfinished object can become a call of one of the tools."""
    spelled = [json.dumps(name, ensure_ascii=False) for name in names]
    at = start
    while text[at : at + 1] in ("{", ","):
        key, at = _value(text, at + 1)
        if key is None:
            return any(json.dumps(each).startswith(text[at:]) for each in KEYS)
        if key not in KEYS or text[at : at + 1] not in ("", ":"):
            return False
        value, at = _value(text, at + 1)
        if key == "arguments" and not isinstance(value, (dict, type(None))):
            return False
        if value is None:
            begun = text[at:]
            is_name = any(name.startswith(begun) for name in spelled)
            return begun[:1] in ("", "{") if key == "arguments" else is_name
        if key == "name" and value not in names:
            return False
    return True


def _value(text: str, start: int) -> tuple[Any, int]:
    """Return a value and the position after it; or None and its position if it is unfinished."""
    at = _skip(text, start)
    try:
        value, end = _DECODER.raw_decode(text, at)
    except ValueError:
        return None, at
    return value, _skip(text, end)


def _skip(text: str, at: int) -> int:
    """Return the position of the next character that is not whitespace."""
    found = _SPACE.match(text, at)
    return found.end() if found else at
