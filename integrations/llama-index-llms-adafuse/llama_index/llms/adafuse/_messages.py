"""LlamaIndex's messages as the plain turns that every chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.prompts import BasePromptTemplate

from adafuse_llm import InvalidInputError
from adafuse_llm.adapters.conversation import Call, Turn

_ROLES = {"chatbot": "assistant", "model": "assistant", "function": "tool", "developer": "system"}
_UNREAD = (ThinkingBlock, CachePoint)
"""Blocks that are no part of what a member reads."""


def to_turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Role and text of each message, with its calls of tools.

    Raises:
        InvalidInputError: a message holds something that is not text.
    """
    return [_turn(number, message) for number, message in enumerate(messages)]


def extend(
    messages: Sequence[ChatMessage],
    system_prompt: str | None,
    query_wrapper_prompt: BasePromptTemplate | None,
) -> list[ChatMessage]:
    """Messages that begin with the system prompt, once, and whose last user's words are wrapped."""
    extended = list(messages)
    if query_wrapper_prompt is not None:
        users = [n for n, message in enumerate(extended) if message.role == "user"]
        for number in users[-1:]:
            extended[number] = _wrapped(extended[number], query_wrapper_prompt)
    if not system_prompt:
        return extended
    first = extended[0] if extended and extended[0].role == "system" else None
    if first is None:
        return [ChatMessage(role="system", content=system_prompt), *extended]
    said = first.content or ""
    if said == system_prompt:  # `predict` has put it there
        return extended
    both = ChatMessage(role="system", content=f"{system_prompt}\n\n{said}")
    return [both, *extended[1:]]


def _wrapped(message: ChatMessage, wrapper: BasePromptTemplate) -> ChatMessage:
    text = wrapper.format(query_str=message.content or "")
    others = [block for block in message.blocks if not isinstance(block, TextBlock)]
    return ChatMessage(role=message.role, blocks=[*others, TextBlock(text=text)])


def _turn(number: int, message: ChatMessage) -> Turn:
    texts: list[str] = []
    calls: list[Call] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolCallBlock):
            calls.append(_call(number, block))
        elif not isinstance(block, _UNREAD):
            raise InvalidInputError(
                f"message {number} holds a {type(block).__name__}; local text models take text only"
            )
    role = message.role.value
    turn = Turn(role=_ROLES.get(role, role), content="\n".join(texts))
    if calls:
        turn["tool_calls"] = calls
    said = message.additional_kwargs
    if turn["role"] == "tool":
        if isinstance(identity := said.get("tool_call_id"), str):
            turn["tool_call_id"] = identity
        else:  # what an agent without calls observed
            turn["role"] = "user"
    if isinstance(name := said.get("name"), str):
        turn["name"] = name
    return turn


def _call(number: int, block: ToolCallBlock) -> Call:
    arguments: Any = block.tool_kwargs
    if not isinstance(arguments, dict):
        raise InvalidInputError(
            f"message {number} calls {block.tool_name!r} with arguments that are no object: "
            f"{arguments!r}"
        )
    return Call(id=block.tool_call_id or "", name=block.tool_name, arguments=arguments)
