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

from adafuse_llm.adapters.conversation import Turn


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
            text = query_wrapper_prompt.format(query_str=result[number].content or "")
            result[number] = _with_text(result[number], text)
    if not system_prompt:
        return result
    first = result[0] if result and result[0].role == "system" else None
    if first is None:
        return [ChatMessage(role="system", content=system_prompt), *result]
    if first.content == system_prompt:  # `predict` already added it
        return result
    return [_with_text(first, f"{system_prompt}\n\n{first.content or ''}"), *result[1:]]


def _with_text(message: ChatMessage, text: str) -> ChatMessage:
    others = [block for block in message.blocks if not isinstance(block, TextBlock)]
    return ChatMessage(role=message.role, blocks=[*others, TextBlock(text=text)])


def to_turn(message: ChatMessage) -> Turn:
    """Convert a message.

    Calls may come from other LLMs: as blocks, or in the form of OpenAI in ``additional_kwargs``.
    """
    extras = message.additional_kwargs
    parts: list[Any] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            call_id, arguments = block.tool_call_id or "", block.tool_kwargs
            calls.append({"id": call_id, "name": block.tool_name, "arguments": arguments})
        elif isinstance(block, ThinkingBlock):
            reasoning.append(block.content or "")
        elif isinstance(block, TextBlock):
            parts.append(block.text)
        elif not isinstance(block, CachePoint):
            parts.append({"type": type(block).__name__})
    if not calls:  # LLMs of OpenAI's API may leave their own objects here
        others = extras.get("tool_calls") or ()
        calls = [call if isinstance(call, dict) else call.model_dump() for call in others]
    return Turn(
        role=message.role.value,
        content=parts,
        name=extras.get("name"),
        tool_calls=calls,
        tool_call_id=extras.get("tool_call_id"),
        reasoning="\n\n".join(filter(None, reasoning)) or extras.get("reasoning_content"),
    )
