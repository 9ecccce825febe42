"""Convert LlamaIndex's messages to turns of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    BaseContentBlock,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.prompts import BasePromptTemplate

from adafuse_llm import InvalidInputError
from adafuse_llm.adapters.conversation import Turn

_ROLES = {"chatbot": "assistant", "model": "assistant", "function": "tool", "developer": "system"}
_IGNORED_BLOCKS = (ThinkingBlock, CachePoint)
"""Types of blocks that are not part of the text of a message."""


_UNTITLED = "input_document"
"""The title that LlamaIndex gives to a document without one."""


class Instructions(ChatMessage):
    """Instructions for the form of the reply, which end the members' system text."""


def to_turns(messages: Sequence[ChatMessage], warn: Callable[[str], None]) -> list[Turn]:
    """Convert messages to turns with a role, text and tool calls.

    Calls may come from other LLMs: as blocks, or in the form of OpenAI in ``additional_kwargs``. If
    no earlier message has the call that a result belongs to, the result becomes a user message.

    Args:
        messages: the conversation.
        warn: called with one sentence if blocks of tools or of other LLMs are left out.

    Raises:
        InvalidInputError: a message has content that is not text, or a call that cannot be read.
    """
    turns: list[Turn] = []
    call_ids: set[str] = set()
    omitted: set[str] = set()
    for number, message in enumerate(messages):
        turn = _turn(number, message, omitted)
        call_ids |= {str(call["id"]) for call in turn.get("tool_calls") or () if call["id"]}
        if turn["role"] == "tool" and turn.get("tool_call_id") not in call_ids:
            turn["role"] = "user"
        turns.append(turn)
    if omitted:
        names = ", ".join(sorted(omitted))
        warn(f"members read only text, so blocks of tools and other LLMs are left out: {names}")
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
            result[number] = _wrap(result[number], query_wrapper_prompt)
    if not system_prompt:
        return result
    first = result[0] if result and result[0].role == "system" else None
    if first is None:
        return [ChatMessage(role="system", content=system_prompt), *result]
    if first.content == system_prompt:  # `predict` already added it
        return result
    before = TextBlock(text=f"{system_prompt}\n")
    return [ChatMessage(role="system", blocks=[before, *first.blocks]), *result[1:]]


def _wrap(message: ChatMessage, wrapper: BasePromptTemplate) -> ChatMessage:
    text = wrapper.format(query_str=message.content or "")
    others = [block for block in message.blocks if not isinstance(block, TextBlock)]
    return ChatMessage(role=message.role, blocks=[*others, TextBlock(text=text)])


def _turn(number: int, message: ChatMessage, omitted: set[str]) -> Turn:
    """Convert a message. Add the types of blocks that are left out to `omitted`."""
    role = _ROLES.get(message.role.value, message.role.value)
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    here: set[str] = set()
    may_omit = here if role in ("tool", "assistant") else None  # a user can change a message
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            call_id, arguments = block.tool_call_id or "", block.tool_kwargs
            calls.append({"id": call_id, "name": block.tool_name, "arguments": arguments})
        elif not isinstance(block, _IGNORED_BLOCKS):
            text = _block_text(number, block, may_omit)
            texts += [] if text is None else [text]
    if role == "tool" and here and not texts:
        texts.append(f"({', '.join(sorted(here))} left out)")
    omitted |= here
    turn = Turn(role=role, content="\n".join(texts))
    extras = message.additional_kwargs
    if reasoning := _reasoning(message):
        turn["reasoning"] = reasoning
    if calls := calls or [_openai_call(each) for each in extras.get("tool_calls") or ()]:
        turn["tool_calls"] = calls
    if isinstance(answered := extras.get("tool_call_id"), str):
        turn["tool_call_id"] = answered
    if isinstance(name := extras.get("name"), str):
        turn["name"] = name
    return turn


def _reasoning(message: ChatMessage) -> str:
    """Return the reasoning that a message keeps apart from its text, or ""."""
    blocks = [block for block in message.blocks if isinstance(block, ThinkingBlock)]
    apart = message.additional_kwargs.get("reasoning_content")
    return "\n\n".join(block.content for block in blocks if block.content) or (
        apart if isinstance(apart, str) else ""
    )


def _openai_call(call: Any) -> dict[str, Any]:
    """Convert a call in the form of OpenAI: an object of its library, or the same as dicts."""
    function = _get(call, "function")
    named = {name: _get(function, name) for name in ("name", "arguments")}
    return {"id": _get(call, "id") or "", **named}


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)


def _block_text(number: int, block: BaseContentBlock, omitted: set[str] | None) -> str | None:
    """Return the text of a block, for a document with its title and its source before it.

    Args:
        number: number of the message, for errors.
        block: the block.
        omitted: receives the types of blocks without text, which are then left out; None to refuse
            such blocks.

    Returns:
        The text, or None if the block is left out.

    Raises:
        InvalidInputError: a block has no text, and `omitted` is None.
    """
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, (CitableBlock, CitationBlock)):
        parts = block.content if isinstance(block, CitableBlock) else [block.cited_content]
        texts = [_block_text(number, part, omitted) for part in parts]
        heading = [f"Title: {block.title}", f"Source: {block.source}"]
        return "\n".join([*heading, *filter(None, texts)])
    if isinstance(block, DocumentBlock) and (text := _document_text(block)) is not None:
        return text if block.title in (None, _UNTITLED) else f"Title: {block.title}\n{text}"
    if omitted is not None:
        omitted.add(type(block).__name__)
        return None
    raise InvalidInputError(
        f"message {number} contains {type(block).__name__}, but members read only text in UTF-8. "
        "Extract the text of a document first, for example with a reader of LlamaIndex, and pass "
        "it as data or path"
    )


def _document_text(block: DocumentBlock) -> str | None:
    """Return the text of a document; None if it is no text, or at a URL, which is not read."""
    if not block.data and not block.path and not str(block.url or "").startswith("data:"):
        return None
    try:
        text = block.resolve_document().read().decode("utf-8-sig")
    except (OSError, ValueError):
        return None
    return None if "\0" in text else text
