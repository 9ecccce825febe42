"""Conversations with tools, written as plain messages that every chat template accepts.

Most chat templates do not support tools, and those that do use different formats. Members that read
different formats could not agree on how to write a call. This module therefore describes the tools
to all members in the same words. For example, a member reads ::

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
    """A tool call by the assistant. The message with its result refers to the call by `id`."""

    id: str
    name: str
    arguments: dict[str, Any]


class Turn(TypedDict, total=False):
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool`` (the result of a call), or another
            framework's name for one of these roles.
        content: text, or a list of text parts.
        name: name of the speaker. A user's name is written before the content; other names are
            ignored.
        tool_calls: calls in an assistant's message.
        tool_call_id: in a tool's message, the id of the call that it answers.
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
    """Convert a conversation with tools to messages for `AdaFuseEngine.generate`.

    Reasoning at the beginning of assistant turns is removed.

    Args:
        turns: the conversation, in order.
        tools: tools to describe at the end of the first system message. If the conversation does
            not start with a system message, one is added.
        tool_choice: ``"auto"``; ``"none"`` to omit the tools; ``"required"`` to request a call of
            any tool; or the name of a tool, to request a call of that tool.
        instructions: text to append to the first system message, after the tools.

    Raises:
        InvalidInputError: the conversation is empty; a turn has an unknown role, content that is
            not text, tool calls outside an assistant's turn, calls that cannot be written as JSON,
            or a result without a matching call; two tools have the same name; or `tool_choice`
            does not fit `tools`.
    """
    tool_names: dict[str, str] = {}  # maps the ids of calls to the tools' names
    messages: list[Message] = []
    follows_result = False
    for number, turn in enumerate(turns):
        label = f"message {number}"
        role = check_role(turn.get("role"), label)
        content = check_content(turn.get("content"), label)
        if turn.get("tool_calls") and role != "assistant":
            raise InvalidInputError(
                f"{label} has role {role!r}; only an assistant message can have tool_calls"
            )
        if role == "tool":
            block = _result_block(turn, content, tool_names, label)
            if follows_result:
                block = f"{messages.pop()['content']}\n{block}"
            messages.append({"role": "user", "content": block})
        elif role == "assistant":
            calls = turn.get("tool_calls") or ()
            blocks = [_block(CALL_OPENS, _call_json(call, label), CALL_CLOSES) for call in calls]
            tool_names |= {str(call.get("id")): call["name"] for call in calls}
            text = _without_reasoning(content)
            if blocks:  # each call begins on a new line, as in members' replies
                text = "\n".join([*filter(None, [text.rstrip("\n")]), *blocks])
            messages.append({"role": role, "content": text})
        else:
            name = turn.get("name") if role == "user" else None
            messages.append({"role": role, "content": f"{name}: {content}" if name else content})
        follows_result = role == "tool"
    if not messages:
        raise InvalidInputError("the conversation is empty: pass at least one user message")
    return _with_system(messages, [_describe_tools(tools, tool_choice), instructions.strip()])


def _with_system(messages: list[Message], texts: Iterable[str]) -> list[Message]:
    """Append `texts` to the first system message, or add one."""
    first = messages[0]["content"] if messages[0]["role"] == "system" else ""
    content = "\n\n".join(text for text in (first, *texts) if text)
    if not content:
        return messages
    rest = messages[messages[0]["role"] == "system" :]
    return [{"role": "system", "content": content}, *rest]


def _describe_tools(tools: Sequence[Tool], choice: str) -> str:
    """Return the section of the prompt about tools. It is empty if the members can call none."""
    names = [tool.name for tool in tools]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidInputError(
            f"tools need different names; got {', '.join(twice)} more than once"
        )
    if choice not in (*TOOL_CHOICES, *names):
        raise InvalidInputError(
            f"tool_choice must be {', '.join(TOOL_CHOICES)} or the name of a tool "
            f"({', '.join(names) or 'no tools given'}); got {choice!r}."
            f"{nearest(choice, [*TOOL_CHOICES, *names])}"
        )
    if choice == "required" and not tools:
        raise InvalidInputError("tool_choice='required' needs at least one tool; got none")
    if choice == "none" or not tools:
        return ""
    request = {"auto": AUTO, "required": REQUIRED}.get(choice, NAMED.format(name=choice))
    lines = [
        _json(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            f"tool {tool.name!r}",
        )
        for tool in tools
    ]
    return "\n\n".join([TOOLS, "\n".join(lines), f"{HOW_TO_CALL} {request}"])


def _result_block(turn: Turn, content: str, tool_names: Mapping[str, str], label: str) -> str:
    """Return the result of a call in the format that members read."""
    key = turn.get("tool_call_id")
    if key is None or key not in tool_names:
        raise InvalidInputError(
            f"{label} is the result of a call with id {key!r}, but no earlier assistant message "
            f"has a call with that id. Ids of earlier calls: "
            f"{', '.join(map(repr, tool_names)) or 'none'}"
        )
    result = _json({"name": tool_names[key], "content": content}, label)
    return _block(RESULT_OPENS, result, RESULT_CLOSES)


def _call_json(call: Call, label: str) -> str:
    if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), Mapping):
        raise InvalidInputError(
            f"{label} has a tool call without a name or a mapping of arguments: {call!r:.80}"
        )
    return _json({"name": call["name"], "arguments": call["arguments"]}, label)


def _block(opens: str, text: str, closes: str) -> str:
    r"""Return JSON `text` between markers.

    ``</`` is escaped as ``<\/``, so the text cannot contain a closing marker.
    """
    escaped = text.replace("</", r"<\/")
    return f"{opens}\n{escaped}\n{closes}"


def _json(value: Mapping[str, Any], label: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_to_plain)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{label} cannot be written as JSON: {error}") from error


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} {value!r:.40} is not JSON")


def _without_reasoning(content: str) -> str:
    parser = ReplyParser()
    parts = [*parser.feed(content), *parser.close()]
    text = "".join(part.text for part in parts if isinstance(part, Text))
    return text if text == content else text.lstrip()
