"""Function calling: tools of a request, and replies with tool calls."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.tools import BaseTool
from llama_index.llms.adafuse._decode import Chunk

from adafuse_llm import InvalidInputError, Tool
from adafuse_llm.adapters.reply import CUT, ToolCall
from adafuse_llm.adapters.reply_form import ReplyForm, to_flag, to_tool_choice

logger = logging.getLogger(__name__)

TOOL_KEYWORDS = ("tools", "tool_choice", "parallel_tool_calls")
"""Keywords of `AdaFuseLLM.chat` that concern tools."""

WARNINGS_KEY = "adafuse_warnings"
"""Key in the ``additional_kwargs`` of responses, with what is wrong with the calls of a reply."""


def form_of(keywords: Mapping[str, Any]) -> ReplyForm:
    """Return the form of replies that the keywords of a chat ask for with tools.

    Raises:
        InvalidInputError: the tools or the choice have an unknown form, or the choice does not fit
            the tools.
        InvalidOptionError: ``parallel_tool_calls`` is neither a bool nor None.
    """
    tools = tuple(map(_tool, keywords.get("tools") or ()))
    choice = to_tool_choice(keywords.get("tool_choice"), [tool.name for tool in tools])
    if choice == "required" and not tools:
        raise InvalidInputError("tool_choice='required' needs at least one tool; got none")
    name = "parallel_tool_calls"
    return ReplyForm(tools, choice, to_flag(name, keywords.get(name), default=True))


def to_openai_tool(tool: BaseTool) -> dict[str, Any]:
    """Describe a tool in the form of OpenAI.

    Unlike core, keep long descriptions, the name, and a recursive class, whose schema is a
    reference.
    """
    metadata = tool.metadata
    schema = metadata.fn_schema.model_json_schema() if metadata.fn_schema else {}
    whole = {key: value for key, value in schema.items() if key not in ("title", "description")}
    function = {
        "name": metadata.get_name(),
        "description": metadata.description,
        "parameters": {**whole, **metadata.get_parameters_dict()},
    }
    return {"type": "function", "function": function}


def _tool(tool: Any) -> Tool:
    if isinstance(tool, BaseTool):
        tool = to_openai_tool(tool)
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidInputError(
            "tools must be tools of LlamaIndex, or dicts such as {'type': 'function', 'function': "
            f"{{'name': ..., 'description': ..., 'parameters': ...}}}}; got {tool!r:.100}"
        )
    return Tool(
        function["name"], function.get("description") or "", function.get("parameters") or {}
    )


class Reply:
    """A converter from the chunks of a reply to chat responses with text, reasoning and tool calls.

    The text excludes reasoning and calls. A malformed call, which only a reply without enforcement
    can have, stays in the text, unless a length limit cut it off. Whitespace after reasoning and
    after calls is removed.

    Args:
        form: the form of the reply.
        is_step: whether the reply is a step of a ReAct agent.
    """

    def __init__(self, form: ReplyForm, *, is_step: bool = False) -> None:
        self._reader = form.reader()
        self._is_step = is_step
        self._text = ""
        self._thinking = ""
        self._calls: list[ToolCallBlock] = []
        self._next_id = _call_id()

    def take(self, chunk: Chunk) -> ChatResponse:
        """Return the response after one more chunk.

        An unfinished call is the last of the calls as soon as its arguments have begun. Its
        ``tool_kwargs`` are then JSON text.
        """
        reason = chunk.raw.finish_reason
        added = self._reader.add(chunk.delta, chunk.reply_prefix, reason, chunk.raw.closing)
        for warning in added.warnings:
            logger.warning("%s", warning)
        delta = added.content
        for call in added.calls:
            assert isinstance(call, ToolCall), "malformed calls are text"
            self._calls.append(_block(self._next_id, call.name, call.arguments))
            self._next_id = _call_id()
        self._text += delta
        if self._is_step and reason in CUT:
            self._text = _without_cut_input(self._text)
        self._thinking += added.reasoning
        calls = [*self._calls, *(self._unfinished_call() if reason is None else ())]
        extras = {"thinking_delta": added.reasoning, WARNINGS_KEY: added.warnings}
        return ChatResponse(
            message=self._message(calls),
            delta=delta,
            raw=chunk.raw,
            logprobs=chunk.logprobs,
            additional_kwargs={key: value for key, value in extras.items() if value},
        )

    def _message(self, calls: list[ToolCallBlock]) -> ChatMessage:
        blocks: list[ContentBlock] = []
        if self._thinking:
            blocks.append(ThinkingBlock(content=self._thinking))
        if self._text or not calls:
            blocks.append(TextBlock(text=self._text))
        # programs of core recognize calls by this entry
        extras = {"tool_calls": [_openai_call(call) for call in calls]} if calls else {}
        return ChatMessage(
            role=MessageRole.ASSISTANT, blocks=[*blocks, *calls], additional_kwargs=extras
        )

    def take_completion(self, chunk: Chunk) -> CompletionResponse:
        """Return the completion after one more chunk. Its text excludes reasoning."""
        response = self.take(chunk)
        return CompletionResponse(
            text=self._text,
            delta=response.delta,
            raw=chunk.raw,
            logprobs=chunk.logprobs,
            additional_kwargs=response.additional_kwargs,
        )

    def _unfinished_call(self) -> list[ToolCallBlock]:
        if (begun := self._reader.unfinished()) is None:
            return []
        name, arguments = begun
        try:
            complete, _ = json.JSONDecoder().raw_decode(arguments)
        except ValueError:
            return [_block(self._next_id, name, arguments)]
        return [_block(self._next_id, name, complete)]


def selections(message: ChatMessage) -> list[ToolSelection]:
    """Return the calls in a message. Arguments that are JSON text may be unfinished."""
    return [
        ToolSelection(
            tool_id=block.tool_call_id or "",
            tool_name=block.tool_name,
            tool_kwargs=_arguments(block.tool_kwargs),
        )
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def _block(call_id: str, name: str, arguments: dict[str, Any] | str) -> ToolCallBlock:
    return ToolCallBlock(tool_call_id=call_id, tool_name=name, tool_kwargs=arguments)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _openai_call(block: ToolCallBlock) -> dict[str, Any]:
    arguments = block.tool_kwargs
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": block.tool_name, "arguments": arguments}
    return {"id": block.tool_call_id, "type": "function", "function": function}


def _arguments(arguments: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = parse_partial_json(arguments)
        except (ValueError, TypeError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _without_cut_input(text: str) -> str:
    """Return a step without the input of a tool that a limit cut off. Agents would repair it."""
    step, marker, given = text.rpartition("Action Input:")
    try:
        json.JSONDecoder().raw_decode(given.strip())
    except (ValueError, RecursionError):  # no JSON, or too deep
        return step if marker else text
    return text
