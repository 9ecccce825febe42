"""Read requests of OpenAI's Responses API. The server stores nothing between two requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from adafuse_llm.adapters.conversation import Turn
from adafuse_llm.errors import short_repr
from adafuse_llm.serving.errors import invalid
from adafuse_llm.serving.openai_fields import NO_STORE, Ignored, parse
from adafuse_llm.serving.openai_requests import (
    Conversational,
    Part,
    ServedRequest,
    converse,
    note_of,
    readable,
)

LOGPROBS = "message.output_text.logprobs"
"""The value in ``include`` that asks for log-probabilities."""

ITEMS = ("message", "reasoning", "function_call", "function_call_output")
"""Types of items in the input."""


class _Text(Part):
    format: dict[str, Any] | None = None


class _Reasoning(Part):
    effort: str | None = None


class _ResponseBody(Conversational):
    PROMPT: ClassVar[str] = "input"
    FORM: ClassVar[str] = "text.format"
    LENGTH: ClassVar[str] = "max_output_tokens"

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    include: list[str] = Field(default_factory=list)


def read_response(body: dict[str, Any], ignored: Ignored) -> ServedRequest:
    """Read a request for a response. The arguments and errors are those of `read_chat`."""
    given = parse(_ResponseBody, body, ignored)
    metadata = body.get("metadata")
    asked = ServedRequest(given, ignored, effort=given.reasoning.effort)
    converse(asked, given, _turns(given, ignored), given.text.format)
    if LOGPROBS in given.include:
        asked.options["logprobs"] = True
    asked.echoed = {
        "instructions": given.instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "tools": given.tools,
        "tool_choice": given.tool_choice or "auto",
        "metadata": metadata if isinstance(metadata, dict) else {},
        "text": {"format": given.text.format or {"type": "text"}},
    }
    return asked


def _turns(given: _ResponseBody, ignored: Ignored) -> list[Turn]:
    """Return the conversation in the input of a request.

    The calls of one reply, and the text before them, become one turn. Reasoning belongs to the text
    or the call that follows it.
    """
    turns: list[Turn] = []
    if given.instructions:
        turns.append({"role": "system", "content": given.instructions})
    if isinstance(given.input, str):
        return [*turns, {"role": "user", "content": given.input}]
    reasoning = ""
    for number, sent in enumerate(given.input):
        place = f"input.{number}"
        item = _known(sent, place, ignored)
        kind = item["type"]
        if kind == "reasoning":
            reasoning = _reasoning(item)
            continue
        last: Turn = turns[-1] if turns else {}
        turn: Turn
        if kind == "message":
            role = item.get("role", "")
            turn = {"role": role, "content": readable(item.get("content"), None, ignored)}
        elif kind == "function_call":
            call: Any = {
                "id": _text(item.get("call_id"), f"{place}.call_id"),
                "name": item.get("name"),
                "arguments": item.get("arguments"),
            }
            if last.get("role") == "assistant" and not reasoning:
                last["tool_calls"] = [*(last.get("tool_calls") or ()), call]
                continue
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            turn = {
                "role": "tool",
                "tool_call_id": _text(item.get("call_id"), f"{place}.call_id"),
                "content": readable(item.get("output"), f"{place}.output", ignored),
            }
        if turn["role"] == "assistant" and reasoning:
            turn["reasoning"] = reasoning
        reasoning = ""
        turns.append(turn)
    return turns


def _known(item: dict[str, Any], place: str, ignored: Ignored) -> dict[str, Any]:
    """Return an item as one that members know.

    Calls and results of other types, such as those of custom tools, become calls of functions and
    their results. Of all other types, such as a web search, a note remains.

    Raises:
        ApiError: the item is an address of one that the server would have to store.
    """
    kind = item.get("type") or "message"
    if kind in ITEMS:
        return {**item, "type": kind}
    if kind == "item_reference":
        raise invalid(f"{place} is an item_reference, but {NO_STORE}. Send the item itself.", place)
    note = note_of(kind, place, ignored)
    name, _, role = str(kind).rpartition("_")
    if not isinstance(item.get("call_id"), str) or role not in ("call", "output"):
        return {"type": "message", "role": "assistant", "content": note}
    if role == "output":
        return {**item, "type": "function_call_output"}
    given = json.dumps({"input": item.get("input", item.get("action"))}, ensure_ascii=False)
    return {"name": name, **item, "type": "function_call", "arguments": given}


def _reasoning(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: its content, or its summary."""
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, Sequence) and not isinstance(parts, str):
            texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
            if joined := "\n\n".join(text for text in texts if isinstance(text, str)):
                return joined
    return ""


def _text(value: Any, name: str) -> str | None:
    if not isinstance(value, (str, type(None))):
        raise invalid(f"{name} must be a text; got {short_repr(value)}", name)
    return value
