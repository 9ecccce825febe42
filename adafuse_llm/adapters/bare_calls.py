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
from adafuse_llm.text.conversation import Tool

KEYS = ("name", "arguments")
"""The keys of a call."""

_FENCE = re.compile(r"(?:^|(?<=[}\]]))[ \t]*```[\w-]*[ \t]*$", re.MULTILINE)
_BEGUN = re.compile(
    r"\s*(?:`{1,2}\Z|```[\w-]*[ \t]*(?:\n\s*|\Z))?(?:\[\s*)?(?:\Z|\{\s*(?P<key>.*))", re.DOTALL
)
_WRITTEN = re.compile(r'"name"\s*:\s*"[^"\n]*"\s*,\s*"arguments"\s*:')
_DECODER = json.JSONDecoder()


class NotCallsError(ValueError):
    """A reply is not calls of the tools. The message is empty if it does not look like calls."""


def may_be_calls(text: str) -> bool:
    """Return whether a reply that begins with `text` may be calls: JSON that begins as calls do."""
    begun = _BEGUN.fullmatch(text)
    key = None if begun is None else begun["key"] or ""
    return key is not None and any(
        key.startswith(f'"{each}"') or f'"{each}"'.startswith(key) for each in KEYS
    )


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


def read_calls(text: str, tools: Sequence[Tool]) -> list[str]:
    """Return the JSON of each call of a reply that is nothing but calls of the tools.

    Raises:
        NotCallsError: the reply is not calls of the tools.
    """
    rest = _FENCE.sub("", text).strip()
    calls: list[str] = []
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:  # no JSON, too many digits, or too deep
            is_call = bool(calls) or mentions_call(rest)
            is_text = bool(calls) and rest[0] not in "{["
            problem = "it also has other text" if is_text else f"it is not JSON: {error}"
            raise NotCallsError(problem if is_call else "") from None
        values = value if isinstance(value, list) and not calls else [value]
        for each in values:
            if problem := call_problem(each, tools):
                looks = isinstance(each, Mapping) and set(each) >= set(KEYS)
                raise NotCallsError(problem if looks else "")
            written = rest[:end] if each is value else json.dumps(each, ensure_ascii=False)
            calls.append(written)
        rest = rest[end:].lstrip()
    return calls
