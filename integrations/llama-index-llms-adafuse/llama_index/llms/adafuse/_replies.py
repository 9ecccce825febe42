"""Turn the text of the members into LlamaIndex's responses and into objects."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.llms.adafuse.raw import AdaFuseRaw

from adafuse_llm import MalformedReplyError, StreamEvent
from adafuse_llm.adapters.reply import CUT, CallPiece, ReplyDelta, ToolCall, cut_off
from adafuse_llm.adapters.reply_form import ReplyForm

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

WARNINGS_KEY = "adafuse_warnings"
"""Key of the warnings about the calls of a reply in the ``additional_kwargs`` of responses."""


class Reply:
    """Turns the events of a reply into responses with text, reasoning and tool calls.

    The text excludes reasoning and calls. A malformed call stays in the text, with a warning in
    ``additional_kwargs``; a call that a limit cut off is left out. If `is_step`, the reply is a
    step of a ReAct agent. Without a form, the reply continues a prompt, and all of it is text.
    """

    def __init__(
        self, form: ReplyForm | None, options: Mapping[str, Any], *, is_step: bool = False
    ) -> None:
        self._reader = None if form is None else form.reader(options)
        self._is_step = is_step
        self._text = ""
        self._thinking = ""
        self._calls: list[ToolCallBlock] = []

    def take(
        self, event: StreamEvent, raw: AdaFuseRaw, logprobs: list[list[LogProb]] | None
    ) -> ChatResponse:
        """Return the response after one more event. Arguments of unfinished calls are JSON text."""
        added = ReplyDelta(content=event.text)
        if self._reader is not None:
            added = self._reader.add(event.text, event.reply_prefix, event.generation)
        for warning in added.warnings:
            logger.warning("%s", warning)
        for part in added.parts:
            if isinstance(part, CallPiece):
                if part.name is not None:
                    key = f"call_{uuid.uuid4().hex}"
                    call = ToolCallBlock(tool_call_id=key, tool_name=part.name, tool_kwargs="")
                    self._calls.append(call)
                call = self._calls[-1]
                call.tool_kwargs = f"{call.tool_kwargs}{part.arguments}"
            elif isinstance(part, ToolCall):
                self._calls[-1].tool_kwargs = part.arguments
        if event.generation is not None:
            self._calls = [call for call in self._calls if isinstance(call.tool_kwargs, dict)]
        self._text += added.content
        if self._is_step and raw.finish_reason in CUT:
            self._text = _without_cut_input(self._text)
        self._thinking += added.reasoning
        extras = {"thinking_delta": added.reasoning, WARNINGS_KEY: added.warnings}
        return ChatResponse(
            message=self._message(),
            delta=added.content,
            raw=raw,
            logprobs=logprobs,
            additional_kwargs={key: value for key, value in extras.items() if value},
        )

    def take_completion(self, *of_event: Any) -> CompletionResponse:
        """Return the completion after one more event. Its text excludes reasoning."""
        fields = dict(self.take(*of_event))
        return CompletionResponse(text=fields.pop("message").content or "", **fields)

    def _message(self) -> ChatMessage:
        calls = [call.model_copy() for call in self._calls]  # they change later
        blocks: list[ContentBlock] = [TextBlock(text=self._text), *calls]
        if self._thinking:
            blocks = [ThinkingBlock(content=self._thinking), *blocks]
        # the programs of llama-index-core look for calls in this entry
        whole = [_openai_call(call) for call in calls if isinstance(call.tool_kwargs, dict)]
        extras = {"tool_calls": whole} if whole else {}
        return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extras)


def parsed(output_cls: type[Model], response: ChatResponse) -> Model:
    """Return the object in a reply, ignoring code fences and text around it.

    Raises:
        MalformedReplyError: the reply is no valid object.
    """
    reply, raw = response.message.content or "", response.raw
    cut = cut_off(raw.finish_reason, raw.cut_by) if isinstance(raw, AdaFuseRaw) else ""
    if cut and reply.rfind("{") > reply.rfind("}"):
        raise MalformedReplyError(f"the object is not whole: {cut}")
    with suppress(ValidationError):  # of text around it
        return output_cls.model_validate_json(reply)
    try:
        return PydanticOutputParser(output_cls).parse(reply)  # type: ignore[no-any-return]
    except ValueError as error:
        why = cut or f"{error!s:.200}"
        raise MalformedReplyError(f"the reply is no valid {output_cls.__name__}: {why}") from error


def reason_of(response: ChatResponse) -> str:
    """Return why a reply ended, or "" if it has not ended."""
    return str(getattr(response.raw, "finish_reason", None) or "")


def _openai_call(block: ToolCallBlock) -> dict[str, Any]:
    arguments = json.dumps(block.tool_kwargs, ensure_ascii=False)
    function = {"name": block.tool_name, "arguments": arguments}
    return {"id": block.tool_call_id, "type": "function", "function": function}


def _without_cut_input(text: str) -> str:
    """Remove a tool's input from a step if a limit cut the input off. Agents would repair it."""
    step, marker, value = text.rpartition("Action Input:")
    try:
        json.JSONDecoder().raw_decode(value.strip())
    except (ValueError, RecursionError):  # no JSON, or too deep
        return step if marker else text
    return text
