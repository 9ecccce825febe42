"""Convert LangChain's messages and tools to adafuse-llm's types, and replies to chunks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from adafuse_llm import StreamEvent
from adafuse_llm.adapters.conversation import Call, Turn
from adafuse_llm.adapters.reply import CALL_OPENS, InvalidToolCall, Reasoning, ReplyParser, Text
from adafuse_llm.adapters.reply import ToolCall as ValidToolCall
from adafuse_llm.errors import InvalidInputError, nearest
from adafuse_llm.text.chat import Tool
from langchain_adafuse._rounds import ROUNDS_KEY

ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "function": "tool"}

SKIPPED_BLOCKS = frozenset(
    {
        *("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call"),
        *("reasoning", "thinking", "redacted_thinking", "reasoning_content"),
    }
)
"""Types of blocks that are omitted from assistant messages without a note: reasoning, which no
member reads again, and copies of tool calls."""

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool


def to_turns(messages: Iterable[BaseMessage]) -> list[Turn]:
    """Convert messages to turns.

    In an assistant's message, the text of malformed calls becomes part of the content, and content
    blocks without text are omitted (see `omitted_blocks`).
    """
    return [_to_turn(message) for message in messages]


def omitted_blocks(messages: Iterable[BaseMessage]) -> list[str]:
    """Return the types of the content blocks that `to_turns` omits and that `SKIPPED_BLOCKS` lacks.

    Other providers write such blocks, for example images.
    """
    blocks = [
        block
        for message in messages
        if isinstance(message, AIMessage)
        for block in message.content
        if isinstance(block, dict) and _block_text(block) is None
    ]
    types = {str(block.get("type") or next(iter(block), "empty")) for block in blocks}
    return sorted(types - SKIPPED_BLOCKS)


def _to_turn(message: BaseMessage) -> Turn:
    role = getattr(message, "role", None) or ROLES.get(message.type, message.type)
    turn: Turn = {"role": role, "content": message.content, "name": message.name}
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        content = message.content if isinstance(message.content, list) else [message.content]
        malformed = [call["args"] or "" for call in message.invalid_tool_calls]
        texts = [text for block in content if (text := _block_text(block)) is not None]
        turn["content"] = [*texts, *malformed]
        turn["tool_calls"] = [
            Call(id=call["id"] or "", name=call["name"], arguments=call["args"])
            for call in message.tool_calls
        ]
    return turn


def _block_text(block: str | dict[str, Any]) -> str | None:
    """Return the text of an assistant's content block; None if the block is to be omitted."""
    if isinstance(block, str):
        return block
    if block.get("type") in SKIPPED_BLOCKS:
        return None
    text = block.get("refusal" if block.get("type") == "refusal" else "text")
    return text if isinstance(text, str) else None


def to_tools(tools: Sequence[ToolLike]) -> list[Tool]:
    """Convert tools from any form that LangChain accepts."""
    functions = [convert_to_openai_tool(tool)["function"] for tool in tools]
    return [
        Tool(function["name"], function.get("description", ""), function.get("parameters", {}))
        for function in functions
    ]


def to_tool_choice(choice: str | bool | Mapping[str, Any] | None, names: Sequence[str]) -> str:
    """Convert a tool choice to ``auto``, ``none``, ``required`` or the name of a tool.

    Raises:
        InvalidInputError: `choice` is neither a known value nor one of `names`.
    """
    if isinstance(choice, Mapping):
        choice = choice.get("function", choice).get("name") or choice.get("type")
    aliases = {None: "auto", True: "required", False: "none", "any": "required"}
    resolved = (
        aliases.get(choice, choice) if isinstance(choice, (str, bool)) else aliases.get(choice)
    )
    allowed = ("auto", "none", "required", *names)
    if resolved not in allowed:
        raise InvalidInputError(
            f"tool_choice must be 'any', a bool, or one of {', '.join(allowed)}; got {choice!r}."
            f"{nearest(str(choice), allowed)}"
        )
    return str(resolved)


@dataclass
class Reply:
    """A converter from stream events to chunks with text, reasoning and tool calls.

    It removes white space that follows reasoning or a tool call.

    Args:
        tools: whether to recognize tool calls.
    """

    tools: bool
    _parser: ReplyParser = field(init=False)
    _calls: int = 0
    _at_start: bool = False  # True while only white space has followed a call or reasoning

    def __post_init__(self) -> None:
        self._parser = ReplyParser(tools=self.tools)

    def chunks(
        self,
        event: StreamEvent,
        records: list[dict[str, Any]],
        metadata: dict[str, Any] | None = None,
        usage: UsageMetadata | None = None,
    ) -> list[ChatGenerationChunk]:
        """Return the chunks of one event.

        The first chunk has text and reasoning. Completed calls are in a second chunk, because
        LangChain's event protocol recognizes malformed calls only in a chunk of their own. If the
        last event has calls, its metadata and usage are in a third chunk.

        Args:
            event: an event of the stream.
            records: records of the event's round.
            metadata: metadata of the whole reply, for the last event.
            usage: token usage of the whole reply, for the last event.
        """
        parts = self._parser.feed(event.text)
        if event.generation is not None:
            parts += self._parser.close()
        content, reasoning, calls = "", "", []
        for part in parts:
            if isinstance(part, Text):
                text = part.text.lstrip() if self._at_start else part.text
                self._at_start = self._at_start and not text
                content += text
                continue
            self._at_start = True
            if isinstance(part, Reasoning):
                reasoning += part.text
            else:
                calls.append(self._call_chunk(part))
        extras = {ROUNDS_KEY: records, "reasoning_content": reasoning}
        messages = [
            AIMessageChunk(
                content=content, additional_kwargs={k: v for k, v in extras.items() if v}
            )
        ]
        if calls:
            messages.append(AIMessageChunk(content="", tool_call_chunks=calls))
        if event.generation is not None:
            messages += [AIMessageChunk(content="")] if calls else []
            metadata = dict(metadata or {})
            if self._calls and metadata.get("finish_reason") == "stop":
                metadata["finish_reason"] = "tool_calls"
            messages[-1].response_metadata = metadata
            messages[-1].usage_metadata = usage
            messages[-1].chunk_position = "last"
        return [ChatGenerationChunk(message=message) for message in messages]

    def _call_chunk(self, part: ValidToolCall | InvalidToolCall) -> ToolCallChunk:
        """Convert a call to a chunk.

        LangChain would turn unfinished JSON into a valid call. To prevent this, the chunk of a
        malformed call begins with the opening marker.
        """
        arguments = f"{CALL_OPENS}{part.text}"
        if isinstance(part, ValidToolCall):
            arguments = json.dumps(part.arguments, ensure_ascii=False)
        index, self._calls = self._calls, self._calls + 1
        return tool_call_chunk(
            name=part.name, args=arguments, id=f"call_{uuid.uuid4().hex}", index=index
        )
