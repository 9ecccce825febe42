"""Convert LlamaIndex's messages to turns of a conversation."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from adafuse_llm.adapters.conversation import Turn


def to_turn(message: ChatMessage) -> Turn:
    """Convert a message.

    Calls are blocks or, from some other LLMs, in OpenAI's form in ``additional_kwargs``.
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
