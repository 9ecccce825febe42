"""Convert LlamaIndex's messages to turns of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_ROLES = {"chatbot": "assistant", "model": "assistant", "function": "tool", "developer": "system"}


def to_turns(messages: Sequence[ChatMessage], warn: Callable[[str], None]) -> list[Turn]:
    """Convert messages to turns with a role, text and tool calls.

    Calls may come from other LLMs: as blocks, or in the form of OpenAI in ``additional_kwargs``.
    `warn` is called with one sentence if blocks are left out that are not text, such as images. A
    note is in their place, except in replies.
    """
    omitted: set[str] = set()
    turns = [_turn(message, omitted) for message in messages]
    if omitted:
        names = ", ".join(sorted(omitted))
        warn(f"members read only text, so other blocks are left out: {names}")
    return turns


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
            blocks = result[number].blocks
            others = [block for block in blocks if not isinstance(block, TextBlock)]
            text = query_wrapper_prompt.format(query_str=result[number].content or "")
            result[number] = ChatMessage(role="user", blocks=[*others, TextBlock(text=text)])
    if not system_prompt:
        return result
    first = result[0] if result and result[0].role == "system" else None
    if first is None:
        return [ChatMessage(role="system", content=system_prompt), *result]
    if first.content == system_prompt:  # `predict` already added it
        return result
    before = TextBlock(text=f"{system_prompt}\n")
    return [ChatMessage(role="system", blocks=[before, *first.blocks]), *result[1:]]


def _turn(message: ChatMessage, omitted: set[str]) -> Turn:
    role = _ROLES.get(message.role.value, message.role.value)
    extras = message.additional_kwargs
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            call_id, arguments = block.tool_call_id or "", block.tool_kwargs
            calls.append({"id": call_id, "name": block.tool_name, "arguments": arguments})
        elif isinstance(block, ThinkingBlock):
            reasoning.append(block.content or "")
        elif isinstance(block, CachePoint):
            pass
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        else:
            omitted.add(type(block).__name__)
            if role != "assistant":
                texts.append(f"[{type(block).__name__}, not shown]")
    if not calls:  # LLMs of OpenAI's API may leave their own objects here
        others = extras.get("tool_calls") or ()
        calls = [call if isinstance(call, dict) else call.model_dump() for call in others]
    return Turn(
        role=role,
        content="\n".join(texts),
        name=extras.get("name"),
        tool_calls=calls,
        tool_call_id=extras.get("tool_call_id"),
        reasoning="\n\n".join(filter(None, reasoning)) or extras.get("reasoning_content"),
    )
