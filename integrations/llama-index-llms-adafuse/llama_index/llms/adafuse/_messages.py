"""Convert LlamaIndex's messages to turns of a conversation."""

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
_IGNORED_BLOCKS = (ThinkingBlock, CachePoint)
"""Types of blocks that are not part of the prompt."""


def to_turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Convert messages to turns with a role, text and tool calls.

    Raises:
        InvalidInputError: a message has content that is not text.
    """
    return [_turn(number, message) for number, message in enumerate(messages)]


def add_prompts(
    messages: Sequence[ChatMessage],
    system_prompt: str | None,
    query_wrapper_prompt: BasePromptTemplate | None,
) -> list[ChatMessage]:
    """Add the system prompt if it is missing, and wrap the text of the last user message."""
    result = list(messages)
    if query_wrapper_prompt is not None:
        users = [n for n, message in enumerate(result) if message.role == "user"]
        for number in users[-1:]:
            result[number] = _wrap(result[number], query_wrapper_prompt)
    if not system_prompt:
        return result
    first = result[0] if result and result[0].role == "system" else None
    if first is None:
        return [ChatMessage(role="system", content=system_prompt), *result]
    content = first.content or ""
    if content == system_prompt:  # `predict` already added it
        return result
    combined = ChatMessage(role="system", content=f"{system_prompt}\n\n{content}")
    return [combined, *result[1:]]


def _wrap(message: ChatMessage, wrapper: BasePromptTemplate) -> ChatMessage:
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
        elif not isinstance(block, _IGNORED_BLOCKS):
            raise InvalidInputError(
                f"message {number} contains {type(block).__name__}, but members accept only text"
            )
    role = message.role.value
    turn = Turn(role=_ROLES.get(role, role), content="\n".join(texts))
    if calls:
        turn["tool_calls"] = calls
    extras = message.additional_kwargs
    if turn["role"] == "tool":
        if isinstance(call_id := extras.get("tool_call_id"), str):
            turn["tool_call_id"] = call_id
        else:  # a tool's result from an agent that writes calls as plain text
            turn["role"] = "user"
    if isinstance(name := extras.get("name"), str):
        turn["name"] = name
    return turn


def _call(number: int, block: ToolCallBlock) -> Call:
    arguments: Any = block.tool_kwargs
    if not isinstance(arguments, dict):
        raise InvalidInputError(
            f"message {number} calls {block.tool_name!r} with arguments that are not a mapping: "
            f"{arguments!r}"
        )
    return Call(id=block.tool_call_id or "", name=block.tool_name, arguments=arguments)
