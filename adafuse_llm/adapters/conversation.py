"""Conversations with tools as plain messages, which every chat template takes.

What a member reads of tools is written here, once and the same for all members: most templates
know no tools, those that do write them in ways of their own, and members that were told different
things could not agree on how to call one. A member reads ::

    system      the system message, then the tools and how to call them
    user        What is 1 + 2?
    assistant   <tool_call>
                {"name": "add", "arguments": {"a": 1, "b": 2}}
                </tool_call>
    user        <tool_response>
                {"name": "add", "content": "3"}
                </tool_response>
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from adafuse_llm.adapters.reply import CALL_CLOSES, CALL_OPENS, ReplyParser, Text
from adafuse_llm.errors import InvalidInputError, nearest
from adafuse_llm.text.chat import Message, Tool, check_content, check_role

RESULT_OPENS, RESULT_CLOSES = "<tool_response>", "</tool_response>"

TOOL_CHOICES = ("auto", "none", "required")

TOOLS = """\
# Tools

You have these tools, one in a line, with a JSON schema of their arguments:"""

HOW_TO_CALL = f"""\
To call a tool, end your reply with its name and its arguments as JSON, in this form:

{CALL_OPENS}
{{"name": "the tool's name", "arguments": {{"the argument's name": "its value"}}}}
{CALL_CLOSES}

To call several tools, write one such block after the other. Their results come in the next \
message, each between {RESULT_OPENS} and {RESULT_CLOSES}."""

AUTO = "Call a tool only where it helps; otherwise, answer directly."
REQUIRED = "This time, your reply must call at least one tool."
NAMED = "This time, your reply must call the tool {name}."


class Call(TypedDict):
    """What the assistant asked of a tool; `id` is what the result refers to."""

    id: str
    name: str
    arguments: dict[str, Any]


class Turn(TypedDict, total=False):
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool`` (a result), or another framework's
            word for one of them.
        content: text, or a list of text parts.
        name: who speaks. A user's goes before the content; others are left out.
        tool_calls: an assistant's.
        tool_call_id: of the call whose result this is.
    """

    role: str
    content: str | list[Any] | None
    name: str | None
    tool_calls: Sequence[Call] | None
    tool_call_id: str | None


def to_messages(
    turns: Iterable[Turn],
    *,
    tools: Sequence[Tool] = (),
    tool_choice: str = "auto",
    instructions: str = "",
) -> list[Message]:
    """A conversation with tools as messages for `AdaFuseEngine.generate`.

    Reasoning at the beginning of the assistant's turns is left out.

    Args:
        turns: the conversation, in order.
        tools: described at the end of the system message that the conversation begins with, or of
            a new one.
        tool_choice: ``"auto"``; ``"none"`` to leave the tools out; ``"required"``, or a tool's
            name, to ask for a call of any tool or of that one.
        instructions: added to the end of that system message.

    Raises:
        InvalidInputError: a turn has an unknown role, content that is not text, calls that are not
            an assistant's or not JSON, or a result without its call; two tools have one name;
            there is no such choice of tools.
    """
    named: dict[str, str] = {}  # id of a call to the tool's name
    messages: list[Message] = []
    follows_result = False
    for number, turn in enumerate(turns):
        what = f"message {number}"
        role = check_role(turn.get("role"), what)
        content = check_content(turn.get("content"), what)
        if turn.get("tool_calls") and role != "assistant":
            raise InvalidInputError(f"{what} is the {role}'s; only an assistant's has tool_calls")
        if role == "tool":
            block = _result(turn, content, named, what)
            if follows_result:
                block = f"{messages.pop()['content']}\n{block}"
            messages.append({"role": "user", "content": block})
        elif role == "assistant":
            calls = turn.get("tool_calls") or ()
            blocks = [_block(CALL_OPENS, _called(call, what), CALL_CLOSES) for call in calls]
            named |= {str(call.get("id")): call["name"] for call in calls}
            text = _without_reasoning(content)
            if blocks:  # as the member wrote it: a call begins on a line of its own
                text = "\n".join([*filter(None, [text.rstrip("\n")]), *blocks])
            messages.append({"role": role, "content": text})
        else:
            name = turn.get("name") if role == "user" else None
            messages.append({"role": role, "content": f"{name}: {content}" if name else content})
        follows_result = role == "tool"
    if not messages:
        raise InvalidInputError("the conversation is empty: pass at least one user message")
    return _with_system(messages, [_describe(tools, tool_choice), instructions.strip()])


def _with_system(messages: list[Message], texts: Iterable[str]) -> list[Message]:
    """`texts` at the end of the system message that the conversation begins with."""
    first = messages[0]["content"] if messages[0]["role"] == "system" else ""
    content = "\n\n".join(text for text in (first, *texts) if text)
    if not content:
        return messages
    rest = messages[messages[0]["role"] == "system" :]
    return [{"role": "system", "content": content}, *rest]


def _describe(tools: Sequence[Tool], choice: str) -> str:
    """What members are told of the tools; empty where there are none to call."""
    names = [tool.name for tool in tools]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidInputError(f"tools need different names; got {', '.join(twice)} twice")
    if choice not in (*TOOL_CHOICES, *names):
        raise InvalidInputError(
            f"tool_choice must be {', '.join(TOOL_CHOICES)} or the name of a tool "
            f"({', '.join(names) or 'there are none'}); got {choice!r}."
            f"{nearest(choice, [*TOOL_CHOICES, *names])}"
        )
    if choice == "required" and not tools:
        raise InvalidInputError("tool_choice='required' needs tools; got none")
    if choice == "none" or not tools:
        return ""
    said = {"auto": AUTO, "required": REQUIRED}.get(choice, NAMED.format(name=choice))
    lines = [
        _json(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            f"tool {tool.name!r}",
        )
        for tool in tools
    ]
    return "\n\n".join([TOOLS, "\n".join(lines), f"{HOW_TO_CALL} {said}"])


def _result(turn: Turn, content: str, named: Mapping[str, str], what: str) -> str:
    """The result of a call, as members read it."""
    key = turn.get("tool_call_id")
    if key is None or key not in named:
        raise InvalidInputError(
            f"{what} is the result of a call with the id {key!r}, which no assistant's message "
            f"before it has; calls so far: {', '.join(map(repr, named)) or 'none'}"
        )
    result = _json({"name": named[key], "content": content}, what)
    return _block(RESULT_OPENS, result, RESULT_CLOSES)


def _called(call: Call, what: str) -> str:
    if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), Mapping):
        raise InvalidInputError(
            f"{what} has a tool call without a name or without arguments as a mapping: {call!r:.80}"
        )
    return _json({"name": call["name"], "arguments": call["arguments"]}, what)


def _block(opens: str, text: str, closes: str) -> str:
    r"""`text`, which is JSON, between markers that it cannot spell: JSON may write ``/`` as
    ``\/``.
    """
    harmless = text.replace("</", r"<\/")
    return f"{opens}\n{harmless}\n{closes}"


def _json(value: Mapping[str, Any], what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{what} cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} {value!r:.40} is not JSON")


def _without_reasoning(content: str) -> str:
    parser = ReplyParser()
    parts = [*parser.feed(content), *parser.close()]
    text = "".join(part.text for part in parts if isinstance(part, Text))
    return text if text == content else text.lstrip()
