"""Convert LangChain's messages and tools to adafuse-llm's types."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from adafuse_llm import Tool
from adafuse_llm.adapters.conversation import Turn
from adafuse_llm.text.conversation import check_tools

UNREAD_BLOCKS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use")
"""Types of content blocks that only repeat calls of the message, and are therefore left out."""

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool


def to_turn(message: BaseMessage) -> Turn:
    """Convert a message. In a tool's result, blocks that LangChain does not know become JSON."""
    kind = message.type.removesuffix("MessageChunk").lower()
    parts: list[Any] = []
    reasoning: list[str] = []
    for standard in message.content_blocks:
        block: dict[str, Any] = {**standard}
        if is_unknown := block["type"] == "non_standard":
            block = block["value"]
        block_type = str(block.get("type") or next(iter(block), "empty"))
        if isinstance(text := block.get("text", block.get("refusal")), str):
            parts += [text] if text else []
        elif block_type in ("reasoning", "thinking"):
            reasoning.append(block.get(block_type) or "")
        elif is_unknown and isinstance(message, ToolMessage):
            value = block.get("json", block)
            parts.append(json.dumps(value, ensure_ascii=False, default=str))
        elif block_type not in UNREAD_BLOCKS:
            parts.append({"type": block_type})
    role = getattr(message, "role", kind)
    turn: Turn = {"role": role, "content": parts, "name": message.name}
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    elif isinstance(message, AIMessage):
        turn["reasoning"] = "\n\n".join(filter(None, reasoning)) or None
        turn["tool_calls"] = [
            {"id": call["id"] or "", "name": call["name"], "arguments": call["args"] or {}}
            for call in (*message.tool_calls, *message.invalid_tool_calls)
        ]
    return turn


def as_function(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema, or the one in a ``response_format``, as a function of OpenAI's API."""
    schema = schema.get("json_schema", schema) if schema.get("type") == "json_schema" else schema
    name = schema.get("name", "output")
    if isinstance(inner := schema.get("schema"), dict):
        schema = inner
    elif {"name", "function", "parameters", "toolSpec"} & schema.keys():
        return schema
    described = {key: schema[key] for key in ("description",) if key in schema}
    parameters = {key: schema[key] for key in schema if key not in ("title", "description")}
    return {"name": schema.get("title", name), **described, "parameters": parameters}


def openai_tool(tool: ToolLike, strict: bool | None = None) -> dict[str, Any]:
    """Convert a tool to OpenAI's form, with its whole schema.

    LangChain's own conversion drops schemas without ``properties``, such as that of a list, and the
    recursive parts of a class's schema.
    """
    model = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
    if isinstance(tool, dict) and "title" in tool:
        tool = as_function(tool)
    elif isinstance(model, type) and issubclass(model, BaseModel):
        function = as_function({"title": model.__name__, **model.model_json_schema()})
        if isinstance(tool, BaseTool):
            function |= {"name": tool.name, "description": tool.description}
        if _is_recursive(function["parameters"]):
            tool = function
    return convert_to_openai_tool(tool, strict=strict)


def _is_recursive(schema: dict[str, Any]) -> bool:
    texts = {name: json.dumps(part) for name, part in schema.get("$defs", {}).items()}
    used = {name: {other for other in texts if f'/{other}"' in texts[name]} for name in texts}
    for _ in used:
        used = {name: names.union(*map(used.__getitem__, names)) for name, names in used.items()}
    return any(name in names for name, names in used.items())


def to_tools(tools: Sequence[ToolLike]) -> tuple[Tool, ...]:
    """Convert tools from any form that LangChain accepts.

    Raises:
        InvalidInputError: a tool runs on the servers of another provider, or has no name.
    """
    return check_tools([openai_tool(tool) for tool in tools])
