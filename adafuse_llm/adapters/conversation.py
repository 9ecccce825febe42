"""Conversations of frameworks, converted for the engine.

`to_conversation` keeps the structure of tools, calls and results, so that each member can read
them in the form of its own chat template. `to_messages` writes them as plain messages in the common
form, which every chat template accepts. `adafuse_llm.text.conversation` describes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import TypedDict

from adafuse_llm.reasoning import split_reasoning
from adafuse_llm.text.chat import Message, Tool, check_content, check_role
from adafuse_llm.text.conversation import (
    Call,
    Conversation,
    check_conversation,
    check_results,
)

__all__ = ["Call", "Conversation", "Turn", "to_conversation", "to_messages"]


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
        reasoning: in an assistant's message, the reasoning before the content. Without it,
            reasoning between ``<think>`` and ``</think>`` at the beginning of the content counts.
    """

    role: str
    content: str | list[Any] | None
    name: str | None
    tool_calls: Sequence[Call] | None
    tool_call_id: str | None
    reasoning: str | None


def to_conversation(
    turns: Iterable[Turn],
    *,
    tools: Sequence[Tool] = (),
    tool_choice: str = "auto",
    instructions: str = "",
) -> Conversation:
    """Convert a conversation with tools for ``AdaFuseEngine.generate(messages=...)``.

    Reasoning at the beginning of assistant turns becomes ``reasoning_content``, which only chat
    templates show that read it.

    Args:
        turns: the conversation, in order.
        tools: tools that the reply can call.
        tool_choice: ``"auto"``; ``"none"`` to omit the tools; ``"required"`` to request a call of
            any tool; or the name of a tool, to request a call of that tool.
        instructions: text to append to the first system message, after the tools. If the
            conversation does not start with a system message, one is added.

    Raises:
        InvalidInputError: the conversation is empty; a turn has an unknown role, content that is
            not text, tool calls outside an assistant's turn, calls that cannot be written as JSON,
            or a result without a matching call; two tools have the same name; or `tool_choice`
            does not fit `tools`.
    """
    messages = [_to_message(number, turn) for number, turn in enumerate(turns)]
    conversation = check_conversation(messages, tools, tool_choice, instructions=instructions)
    check_results(conversation.messages)
    return conversation


def to_messages(
    turns: Iterable[Turn],
    *,
    tools: Sequence[Tool] = (),
    tool_choice: str = "auto",
    instructions: str = "",
) -> list[Message]:
    """Convert a conversation with tools to plain messages in the common form.

    The arguments and errors are the same as for `to_conversation`. The tools are described at the
    end of the first system message.
    """
    conversation = to_conversation(
        turns, tools=tools, tool_choice=tool_choice, instructions=instructions
    )
    return conversation.flat()


def _to_message(number: int, turn: Turn) -> dict[str, Any]:
    """Return a message without the name of its speaker, with its reasoning apart."""
    label = f"message {number}"
    role = check_role(turn.get("role"), label)
    content = check_content(turn.get("content"), label)
    reasoning = turn.get("reasoning") or ""
    if role == "assistant":
        thought, content = split_reasoning(content)
        reasoning = reasoning or thought
    elif role == "user" and (name := turn.get("name")):
        content = f"{name}: {content}"
    message: dict[str, Any] = {"role": role, "content": content}
    if calls := turn.get("tool_calls"):
        message["tool_calls"] = calls
    if role == "tool":
        message["tool_call_id"] = turn.get("tool_call_id")
    if role == "assistant" and reasoning:
        message["reasoning_content"] = reasoning
    return message
