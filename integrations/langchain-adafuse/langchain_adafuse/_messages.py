"""Convert LangChain's messages and tools to adafuse-llm's types, and replies to chunks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from adafuse_llm import Tool
from adafuse_llm.adapters.conversation import Turn
from adafuse_llm.adapters.schema import recursive_schema
from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.text.conversation import CALL_OPENS

logger = logging.getLogger(__name__)

ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "function": "tool"}

REASONING_KEYS = {
    "reasoning": "reasoning",
    "thinking": "thinking",
    "reasoning_content": "reasoning_content",
}
"""Types of blocks with reasoning, and the key of its text."""

SKIPPED_BLOCKS = frozenset(
    {
        *("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call"),
        *(*REASONING_KEYS, "redacted_thinking"),
    }
)
"""Types of blocks that are omitted from assistant messages without a note: reasoning, which only
some chat templates show again, and copies of tool calls."""

ERRORS_KEY = "adafuse_call_errors"
"""Key in the ``additional_kwargs`` of chunks, with the errors of malformed calls by id."""

WARNINGS_KEY = "adafuse_warnings"
"""Key in the ``response_metadata``, with what is wrong with the calls of a reply."""

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool


def to_turns(messages: Iterable[BaseMessage]) -> list[Turn]:
    """Convert messages to turns.

    In an assistant's message, content blocks without text are omitted (see `omitted_blocks`).
    """
    return [_to_turn(message) for message in messages]


def omitted_blocks(messages: Iterable[BaseMessage]) -> list[str]:
    """Return the types of the content blocks that `to_turns` omits and that `SKIPPED_BLOCKS` lacks.

    Other providers and tools write such blocks, for example images.
    """
    types: set[str] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            types.update(_result_text(message.content)[1])
        elif isinstance(message, AIMessage):
            blocks = [each for each in message.content if isinstance(each, dict)]
            omitted = [each for each in blocks if _block_text(each) is None]
            types |= {str(each.get("type") or next(iter(each), "empty")) for each in omitted}
    return sorted(types - SKIPPED_BLOCKS)


def _to_turn(message: BaseMessage) -> Turn:
    role = getattr(message, "role", None) or ROLES.get(message.type, message.type)
    turn: Turn = {"role": role, "content": message.content, "name": message.name}
    if isinstance(message, ToolMessage):
        turn["content"], _ = _result_text(message.content)
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        content = message.content if isinstance(message.content, list) else [message.content]
        texts = [text for block in content if (text := _block_text(block)) is not None]
        turn["content"] = "".join(texts)
        turn["reasoning"] = _reasoning(message)
        turn["tool_calls"] = [
            {"id": call["id"] or "", "name": call["name"], "arguments": call["args"]}
            for call in message.tool_calls
        ] + [  # a marker is no JSON, so members read these as text
            {
                "id": call["id"],
                "name": call["name"],
                "arguments": f"{CALL_OPENS}{(call['args'] or '').removeprefix(CALL_OPENS)}",
            }
            for call in message.invalid_tool_calls
        ]
    return turn


def _reasoning(message: AIMessage) -> str:
    """Return the reasoning that a message keeps apart from its text, or ""."""
    apart = message.additional_kwargs.get("reasoning_content")
    if isinstance(apart, str) and apart:
        return apart
    blocks = [block for block in message.content if isinstance(block, dict)]
    found = [block.get(REASONING_KEYS.get(str(block.get("type")), "")) for block in blocks]
    texts = [each.get("text") if isinstance(each, dict) else each for each in found]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _block_text(block: str | dict[str, Any]) -> str | None:
    """Return the text of an assistant's content block; None if the block is to be omitted."""
    if isinstance(block, str):
        return block
    if block.get("type") in SKIPPED_BLOCKS:
        return None
    text = block.get("refusal" if block.get("type") == "refusal" else "text")
    return text if isinstance(text, str) else None


def _result_text(content: str | list[Any]) -> tuple[str, set[str]]:
    """Return the text of a tool's result, and the types of its blocks that have none.

    A block of the type ``json`` becomes JSON text. If there is nothing but images and the like, the
    text names them.
    """
    texts: list[str] = []
    omitted: set[str] = set()
    for part in [content] if isinstance(content, str) else content:
        block = {"text": part} if isinstance(part, str) else part
        if isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif block.get("type") == "json":
            value = block.get("json", block.get("data"))
            texts.append(json.dumps(value, ensure_ascii=False, default=str))
        elif isinstance(block.get("content"), (str, list)):  # such as a search result
            text, others = _result_text(block["content"])
            texts.append(text)
            omitted |= others
        else:
            omitted.add(str(block.get("type")))
    names = ", ".join(sorted(omitted))
    return "\n".join(texts) or (f"({names} left out)" if omitted else ""), omitted


def to_openai_tool(tool: ToolLike, *, strict: bool | None = None) -> dict[str, Any]:
    """Convert a tool from any form that LangChain accepts to a function of OpenAI's API.

    LangChain's converter lets every value pass where a class contains itself, so such a class keeps
    its own schema.

    Raises:
        InvalidInputError: the tool runs on the servers of another provider, or has no name.
    """
    converted = convert_to_openai_tool(tool, strict=strict)
    function = converted.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidInputError(
            "a tool must be a function, a class with a schema, an instance of BaseTool, or a dict "
            "with the schema of a function. Tools that run on another provider's servers are not "
            f"supported; got {short_repr(tool)}"
        )
    if (parameters := recursive_schema(_argument_schema(tool))) is not None:
        parameters.pop("description", None)
        converted = convert_to_openai_tool({**function, "parameters": parameters}, strict=strict)
    return converted


def _argument_schema(tool: ToolLike) -> dict[str, Any]:
    """Return the schema of a tool's arguments; empty for a form that keeps its schema."""
    form: Any = tool
    if isinstance(tool, BaseTool):
        form = tool.tool_call_schema
    elif callable(tool) and not isinstance(tool, type):
        form = create_schema_from_function(
            tool.__name__,
            tool,
            parse_docstring=True,
            error_on_invalid_docstring=False,
            include_injected=False,
        )
    if isinstance(form, type) and is_basemodel_subclass(form):
        read: Any = getattr(form, "model_json_schema", None) or getattr(form, "schema", dict)
        return dict(read())
    if not isinstance(form, dict):
        return {}
    return form if form is not tool or ("title" in form and "name" not in form) else {}


def to_tools(tools: Sequence[ToolLike]) -> list[Tool]:
    """Convert tools from any form that LangChain accepts."""
    functions = [to_openai_tool(tool)["function"] for tool in tools]
    return [
        Tool(function["name"], function.get("description", ""), function.get("parameters", {}))
        for function in functions
    ]
