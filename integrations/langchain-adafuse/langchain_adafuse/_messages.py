"""LangChain's messages and tools in the words of adafuse-llm, and replies in those of LangChain."""

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
from adafuse_llm.adapters.reply import ToolCall as WellFormed
from adafuse_llm.errors import InvalidInputError, nearest
from adafuse_llm.text.chat import Tool
from langchain_adafuse._rounds import ROUNDS_KEY

ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "function": "tool"}

SAID_ELSEWHERE = frozenset(
    {
        *("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call"),
        *("reasoning", "thinking", "redacted_thinking"),
    }
)
"""Types of content blocks of an assistant's message that repeat its calls, or are reasoning."""

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool


def to_turns(messages: Iterable[BaseMessage]) -> list[Turn]:
    """A history as the conversation that members read. Calls that were malformed stay as they were
    written.
    """
    return [_to_turn(message) for message in messages]


def _to_turn(message: BaseMessage) -> Turn:
    role = getattr(message, "role", None) or ROLES.get(message.type, message.type)
    turn: Turn = {"role": role, "content": message.content, "name": message.name}
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        content = message.content if isinstance(message.content, list) else [message.content]
        malformed = [call["args"] or "" for call in message.invalid_tool_calls]
        turn["content"] = [*filter(_is_content, content), *malformed]
        turn["tool_calls"] = [
            Call(id=call["id"] or "", name=call["name"], arguments=call["args"])
            for call in message.tool_calls
        ]
    return turn


def _is_content(block: str | dict[str, Any]) -> bool:
    return isinstance(block, str) or block.get("type") not in SAID_ELSEWHERE


def to_tools(tools: Sequence[ToolLike]) -> list[Tool]:
    """Tools, in any of the forms that LangChain takes."""
    functions = [convert_to_openai_tool(tool)["function"] for tool in tools]
    return [
        Tool(each["name"], each.get("description", ""), each.get("parameters", {}))
        for each in functions
    ]


def to_tool_choice(choice: str | bool | Mapping[str, Any] | None, names: Sequence[str]) -> str:
    """``auto``, ``none``, ``required`` or a tool's name.

    Raises:
        InvalidInputError: there is no such choice.
    """
    if isinstance(choice, Mapping):
        choice = choice.get("function", choice).get("name") or choice.get("type")
    known = {None: "auto", True: "required", False: "none", "any": "required"}
    chosen = known.get(choice, choice) if isinstance(choice, (str, bool)) else known.get(choice)
    allowed = ("auto", "none", "required", *names)
    if chosen not in allowed:
        raise InvalidInputError(
            f"tool_choice must be 'any', a bool, or one of {', '.join(allowed)}; got {choice!r}."
            f"{nearest(str(choice), allowed)}"
        )
    return str(chosen)


@dataclass
class Reply:
    """A reply in chunks. Text, reasoning and calls are told apart;
    white space between them is left out.

    Args:
        tools: whether to look for calls.
    """

    tools: bool
    _parser: ReplyParser = field(init=False)
    _calls: int = 0
    _begins: bool = False  # nothing but white space since the last region

    def __post_init__(self) -> None:
        self._parser = ReplyParser(tools=self.tools)

    def chunks(
        self,
        event: StreamEvent,
        told: list[dict[str, Any]],
        metadata: dict[str, Any] | None = None,
        usage: UsageMetadata | None = None,
    ) -> list[ChatGenerationChunk]:
        """One chunk per event. Calls that it completes follow in a chunk of their own, before the
        end: only there LangChain's protocol of events sees malformed ones.

        Args:
            event: of the stream.
            told: records of its round.
            metadata: of the whole reply, with the last event.
            usage: of the whole reply, with the last event.
        """
        parts = self._parser.feed(event.text)
        if event.generation is not None:
            parts += self._parser.close()
        content, reasoning, calls = "", "", []
        for part in parts:
            if isinstance(part, Text):
                text = part.text.lstrip() if self._begins else part.text
                self._begins = self._begins and not text
                content += text
                continue
            self._begins = True
            if isinstance(part, Reasoning):
                reasoning += part.text
            else:
                calls.append(self._call(part))
        kept = {ROUNDS_KEY: told, "reasoning_content": reasoning}
        messages = [
            AIMessageChunk(content=content, additional_kwargs={k: v for k, v in kept.items() if v})
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

    def _call(self, part: WellFormed | InvalidToolCall) -> ToolCallChunk:
        """A call as a chunk. LangChain completes JSON that breaks off; a malformed call keeps the
        marker that it was opened with, which is no JSON however it goes on.
        """
        arguments = f"{CALL_OPENS}{part.text}"
        if isinstance(part, WellFormed):
            arguments = json.dumps(part.arguments, ensure_ascii=False)
        index, self._calls = self._calls, self._calls + 1
        return tool_call_chunk(
            name=part.name, args=arguments, id=f"call_{uuid.uuid4().hex}", index=index
        )
