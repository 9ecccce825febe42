"""Conversations of frameworks, converted for the engine.

`to_conversation` keeps the structure of tools, calls and results, so that each member can read
them in the form of its own chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from adafuse_llm.reasoning import split_reasoning
from adafuse_llm.text.conversation import (
    CALL_CLOSES,
    CALL_OPENS,
    RESULT_CLOSES,
    RESULT_OPENS,
    Conversation,
    Tool,
    check_content,
    check_conversation,
    check_role,
    function_of,
    to_json,
)


class Turn(TypedDict, total=False):
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool`` (the result of a call), or another
            framework's name for one of these roles.
        content: text, or a list of text parts.
        name: name of the speaker. A user's name is written before the content; other names are
            ignored.
        tool_calls: calls in an assistant's message. The arguments can be JSON text. If it is no
            JSON object, for example because the call was cut off, members read the call and its
            result as text.
        tool_call_id: in a tool's message, the id of the call that it answers.
        reasoning: in an assistant's message, the reasoning before the content. If it is None,
            reasoning between ``<think>`` and ``</think>`` at the beginning of the content counts.
    """

    role: str
    content: str | list[Any] | None
    name: str | None
    tool_calls: Sequence[Mapping[str, Any]] | None
    tool_call_id: str | None
    reasoning: str | None


def to_conversation(
    turns: Iterable[Turn],
    *,
    tools: Sequence[Tool] = (),
    tool_choice: str = "auto",
    instructions: str = "",
) -> Conversation:
    """Convert a conversation for ``AdaFuseEngine.generate(messages=...)``.

    Reasoning at the beginning of assistant turns becomes ``reasoning_content``, which only chat
    templates show that read it. The other arguments are those of `check_conversation`.

    Raises:
        InvalidInputError: as `check_conversation`.
    """
    malformed: dict[str, Any] = {}
    messages = [_to_message(number, turn, malformed) for number, turn in enumerate(turns)]
    return check_conversation(messages, tools, tool_choice, instructions=instructions)


def malformed_calls(turn: Turn) -> list[Mapping[str, Any]]:
    """Return the calls of an assistant's turn whose arguments are text, but no JSON object."""
    calls = turn.get("tool_calls") if turn.get("role") == "assistant" else None
    return [call for call in calls if _is_malformed(call)] if isinstance(calls, list) else []


def _is_malformed(call: Any) -> bool:
    arguments = function_of(call).get("arguments")
    try:
        return isinstance(arguments, str) and not isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return True


def _malformed_block(call: Mapping[str, Any]) -> str:
    """Return a malformed call as members write it. Its name can be apart from its text or in it."""
    function = function_of(call)
    name, text = function.get("name"), function["arguments"].removeprefix(CALL_OPENS).strip()
    if name and '"name"' not in text:
        text = f'{{"name": {json.dumps(name)}, "arguments": {text}}}'
    return f"{CALL_OPENS}\n{text}\n{CALL_CLOSES}"


def _to_message(number: int, turn: Turn, malformed: dict[str, Any]) -> dict[str, Any]:
    """Return a message without the name of its speaker, with its reasoning apart.

    `malformed` has the names of the tools of malformed calls so far, by id.
    """
    label = f"message {number}"
    role = check_role(turn.get("role"), label)
    content = check_content(turn.get("content"), label)
    reasoning = turn.get("reasoning")
    if role == "assistant" and reasoning is None:
        reasoning, content = split_reasoning(content)
    elif role == "user" and (name := turn.get("name")):
        content = f"{name}: {content}"
    message: dict[str, Any] = {"role": role, "content": content}
    calls = turn.get("tool_calls")
    if calls and (bad := malformed_calls(turn)):
        texts = [*filter(None, [content.rstrip("\n")]), *map(_malformed_block, bad)]
        message["content"] = "\n".join(texts)
        calls = [call for call in calls if call not in bad]
        malformed |= {str(call.get("id")): function_of(call).get("name") for call in bad}
    if calls:
        message["tool_calls"] = calls
        for call in calls if isinstance(calls, list) else ():  # clients may use an id again
            malformed.pop(str(call.get("id")) if isinstance(call, Mapping) else "", None)
    if role == "tool" and (key := str(turn.get("tool_call_id"))) in malformed:
        name = malformed[key] or turn.get("name")
        answer = {**({"name": name} if name else {}), "content": content}
        return {"role": "user", "content": f"{RESULT_OPENS}\n{to_json(answer)}\n{RESULT_CLOSES}"}
    if role == "tool":
        message["tool_call_id"] = turn.get("tool_call_id") or ""
    if role == "assistant" and reasoning:
        message["reasoning_content"] = reasoning
    return message
