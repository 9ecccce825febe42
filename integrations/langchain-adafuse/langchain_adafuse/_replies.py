"""The replies of a call of a chat model, as chunks and as messages."""

from __future__ import annotations

import json
import logging
import uuid
from collections import defaultdict
from functools import partial
from typing import Any, cast

from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatResult

from adafuse_llm.adapters.reply import InvalidToolCall, ToolCall
from adafuse_llm.adapters.reply_form import ReplyForm
from adafuse_llm.text.conversation import CALL_OPENS
from langchain_adafuse._calls import Call, Step, output_of, token_usage, usage_of
from langchain_adafuse._rounds import ChatRoundChunk, RoundRecords

logger = logging.getLogger(__name__)

ERRORS_KEY = "adafuse_call_errors"
"""Key in the ``additional_kwargs`` of chunks, with the errors of malformed calls by id."""

WARNINGS_KEY = "adafuse_warnings"
"""Key in the ``response_metadata``, with what is wrong with the calls of a reply."""


class Replies:
    """The replies of a call.

    Args:
        call: the call.
        is_merged: whether the metadata of all chunks will be merged. In LangChain's event protocol,
            which passes its run, the last chunk has to have all of it.
    """

    def __init__(self, call: Call, *, is_merged: bool = True) -> None:
        self._call = call
        self._is_merged = is_merged
        self._replies: defaultdict[int, _Reply] = defaultdict(partial(_Reply, call.form))
        self._chunks: defaultdict[int, list[ChatRoundChunk]] = defaultdict(list)

    def chunks(self, step: Step) -> list[ChatRoundChunk]:
        """Return the chunks of one step.

        The first chunk has text and reasoning. Completed calls are in a second chunk, because
        LangChain's event protocol recognizes malformed calls only in a chunk of their own. If the
        last step has calls, its metadata and usage are in a third chunk. Rounds that write nothing
        yet, such as a part of a call, are in the next chunk.
        """
        call, whole = self._call, step.event.generation
        metadata = call.metadata(step) if self._is_merged else step.metadata
        if whole is not None and not self._is_merged:
            metadata = {**metadata, **call.logprobs(whole.rounds)}
        chunks = self._replies[step.number].chunks(step, metadata, call.kept(step.rounds))
        self._chunks[step.number] += chunks
        return chunks

    def result(self) -> ChatResult:
        """Return the messages of all steps."""
        messages = []
        for _, chunks in sorted(self._chunks.items()):
            (generation,) = generate_from_stream(iter(chunks)).generations
            messages.append(with_call_errors(cast("AIMessage", generation.message)))
        usage = token_usage([each.usage_metadata or {} for each in messages])
        return ChatResult(
            generations=[ChatGeneration(message=each) for each in messages],
            llm_output=output_of(self._call.model.model_name, [usage]),
        )


class _Reply:
    """A converter from the steps of a reply to chunks with text, reasoning and tool calls."""

    def __init__(self, form: ReplyForm) -> None:
        self._reader = form.reader(as_text=False)
        self._calls = 0
        self._has_valid_call = False
        self._rounds: RoundRecords = []

    def chunks(
        self, step: Step, metadata: dict[str, Any], extras: dict[str, Any]
    ) -> list[ChatRoundChunk]:
        whole = step.event.generation
        delta = self._reader.read(step.event)
        if delta.reasoning:
            extras = {**extras, "reasoning_content": delta.reasoning}
        messages = [AIMessageChunk(content=delta.content, additional_kwargs=extras)]
        if delta.calls:
            calls = [self._call_chunk(call) for call in delta.calls]
            errors = {
                str(chunk["id"]): call.error
                for chunk, call in zip(calls, delta.calls, strict=True)
                if isinstance(call, InvalidToolCall)
            }
            others = {ERRORS_KEY: errors} if errors else {}
            messages.append(
                AIMessageChunk(content="", tool_call_chunks=calls, additional_kwargs=others)
            )
        if whole is None:
            messages[0].response_metadata = metadata
        else:
            messages += [AIMessageChunk(content="")] if delta.calls else []
            if delta.warnings:
                metadata = {**metadata, WARNINGS_KEY: delta.warnings}
                logger.warning("%s", "; ".join(delta.warnings))
            if self._has_valid_call and metadata.get("finish_reason") == "stop":
                metadata = {**metadata, "finish_reason": "tool_calls"}
            messages[-1].response_metadata = metadata
            messages[-1].usage_metadata = usage_of(whole)
            messages[-1].chunk_position = "last"
        self._rounds += step.rounds
        chunks = [
            ChatRoundChunk(message=each, number=step.number)
            for each in messages
            if _has_content(each)
        ]
        if chunks:
            chunks[0].rounds, self._rounds = self._rounds, []
            chunks[-1].generation = whole
        return chunks

    def _call_chunk(self, part: ToolCall | InvalidToolCall) -> ToolCallChunk:
        """Convert a call to a chunk.

        LangChain would turn the text of some malformed calls into valid calls. To prevent this, the
        text begins with the opening marker in the chunk (see `with_call_errors`).
        """
        if isinstance(part, ToolCall):
            self._has_valid_call = True
            arguments = json.dumps(part.arguments, ensure_ascii=False)
        else:
            arguments = f"{CALL_OPENS}{part.text}"
        index, self._calls = self._calls, self._calls + 1
        return tool_call_chunk(
            name=part.name, args=arguments, id=f"call_{uuid.uuid4().hex}", index=index
        )


def _has_content(chunk: AIMessageChunk) -> bool:
    """Return whether a chunk is more than a sign that a call is being written."""
    return any(
        (chunk.content, chunk.additional_kwargs, chunk.tool_call_chunks, chunk.response_metadata)
    )


def with_call_errors(message: AIMessage) -> AIMessage:
    """Return a complete message whose malformed calls have their text and their errors.

    LangChain builds these calls from chunks, which have no place for errors.
    """
    if ERRORS_KEY not in message.additional_kwargs:
        return message
    others = dict(message.additional_kwargs)
    errors = others.pop(ERRORS_KEY)
    calls = [
        {
            **call,
            "args": (call["args"] or "").removeprefix(CALL_OPENS),
            "error": errors.get(call["id"], call["error"]),
        }
        for call in message.invalid_tool_calls
    ]
    update = {"additional_kwargs": others, "invalid_tool_calls": calls}
    return message.model_copy(update=update)
