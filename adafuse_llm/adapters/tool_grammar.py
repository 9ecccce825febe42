r"""Grammars of replies with calls, in the form that `adafuse_llm.text.conversation` defines.

`tool_grammar` returns a Lark grammar for the option `grammar` of `AdaFuseEngine.generate`. A member
that follows it calls only tools that exist, with arguments that fit their schemas. For example,
with the tool ``add``, the choice ``"required"`` allows ::

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from adafuse_llm.adapters.schema import closed_schema
from adafuse_llm.errors import GrammarError, InvalidInputError
from adafuse_llm.text.conversation import CALL_CLOSES, CALL_OPENS, Tool
from adafuse_llm.text.reasoning import REASONING_CLOSES, REASONING_OPENS

_SPACE = r"[\s\x1c-\x1f]"
_ANY = "(?s:.*)"
_THOUGHT = f"{_SPACE}*{REASONING_OPENS}{_ANY}"
_THOUGHT_END = REASONING_CLOSES.replace("/", r"\/")
_CALL_END = CALL_CLOSES.replace("/", r"\/")

# The lexer matches the longest terminal. Text up to a marker is therefore a terminal of its own,
# and no other terminal that is possible at the same position can contain the marker. Replies do not
# begin with whitespace here: `ONE_SPACE` allows the one space that a member may write before.
_TEXT_AND_CALLS = rf"""
start: CLOSED_THOUGHT_0 more
     | OPEN_THOUGHT_0
     | TEXT_AND_CALL_0 calls
     | TEXT_0?
more: CLOSED_THOUGHT more
    | OPEN_THOUGHT
    | TEXT_AND_CALL calls
    | TEXT?
OPEN_THOUGHT: /{_THOUGHT}/ & ~/{_ANY}{_THOUGHT_END}{_ANY}/
CLOSED_THOUGHT: /{_THOUGHT}{_THOUGHT_END}/ & ~/{_ANY}{_THOUGHT_END}(?s:.+)/
TEXT: /(?s:.+)/ & ~/{_ANY}({CALL_OPENS}|{_CALL_END}){_ANY}/ & ~/{_THOUGHT}/
TEXT_AND_CALL: /{_ANY}{CALL_OPENS}/ & ~/{_ANY}({CALL_OPENS}|{_CALL_END})(?s:.+)/ & ~/{_THOUGHT}/
OPEN_THOUGHT_0: OPEN_THOUGHT & ~/{_SPACE}{_ANY}/
CLOSED_THOUGHT_0: CLOSED_THOUGHT & ~/{_SPACE}{_ANY}/
TEXT_0: TEXT & ~/{_SPACE}{_ANY}/
TEXT_AND_CALL_0: TEXT_AND_CALL & ~/{_SPACE}{_ANY}/
""".strip()


def tool_grammar(
    tools: Sequence[Tool],
    *,
    choice: str = "auto",
    parallel: bool = True,
    reply: Mapping[str, Any] | None = None,
    problems: list[str] | None = None,
) -> str:
    """Return a Lark grammar (in llguidance's dialect) of replies that may call tools.

    Args:
        tools: at least one tool, each with a different name.
        choice: ``"auto"`` for reasoning and text, then possibly calls; ``"required"`` for one or
            more calls and nothing else; the name of a tool for exactly one call of that tool.
        parallel: whether a reply can have several calls.
        reply: a JSON schema. With it, ``"auto"`` allows replies that fit the schema instead of
            text and reasoning.
        problems: as for `closed_schema`.

    Raises:
        InvalidInputError: a schema cannot be written as JSON.
        GrammarError: the arguments of a tool or `reply` cannot be enforced.
        MissingDependencyError: llguidance is not installed.
    """
    named = choice not in ("auto", "required")
    used = [tool for tool in tools if tool.name == choice] if named else list(tools)
    opens = _literal(CALL_OPENS)
    if choice != "auto":
        rules = [f"start: {opens} calls"]
    elif reply is not None:
        rules = [f"start: reply | {opens} calls", f"reply: {closed_schema(reply, problems)[1]}"]
    else:
        rules = [_TEXT_AND_CALLS]
    several = parallel and not named
    following = _literal("\n" + CALL_OPENS)
    rules.append(f"calls: call ({following} call)*" if several else "calls: call")
    closes = _literal("}\n" + CALL_CLOSES)
    alternatives = []
    for number, tool in enumerate(used):
        name = json.dumps(tool.name, ensure_ascii=False)
        head = _literal(f'\n{{"name": {name}, "arguments": ')
        alternatives.append(f"{head} arguments_{number} {closes}")
        rules.append(f"arguments_{number}: {_rule_of(tool, problems)}")
    rules.append("call: " + "\n    | ".join(alternatives))
    return "\n".join([*rules, ""])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _rule_of(tool: Tool, problems: list[str] | None) -> str:
    label = f"the schema of the tool {tool.name!r}"
    own: list[str] = []
    try:
        rule = closed_schema(_object_schema(tool), None if problems is None else own)[1]
    except InvalidInputError as error:
        own.append(str(error))
        if problems is None or not isinstance(error, GrammarError):
            raise type(error)(f"{label}: {error}") from None
        rule = closed_schema({"type": "object"})[1]
    if problems is not None:
        problems += [f"{label}: {problem}" for problem in own]
    return rule


def _object_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are always an object."""
    empty: tuple[Any, ...] = (None, [])  # some languages write these for what is absent
    schema = {key: value for key, value in tool.parameters.items() if value not in empty}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, (list, tuple)) and "object" in kind):
        raise GrammarError(
            f"it must have the type 'object', because arguments are an object; got {kind!r}"
        )
    if schema.keys() <= {"type", "title", "description", "properties", "required"}:
        schema = {"properties": {}, **schema}
    return {**schema, "type": "object"}
