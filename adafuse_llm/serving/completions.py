"""Write chat completions and completions in the form of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from adafuse_llm.adapters.logprobs import openai_logprobs, openai_usage
from adafuse_llm.adapters.reply import CallPiece, InvalidToolCall, ReplyReader, ToolCall
from adafuse_llm.remote import wire
from adafuse_llm.remote.wire import EXTENSION
from adafuse_llm.results import Generation, Round, StreamEvent, total_usage
from adafuse_llm.serving.bodies import ServedRequest
from adafuse_llm.serving.errors import ApiError
from adafuse_llm.serving.sse import DONE
from adafuse_llm.serving.sse import event as sent_event

FINISH_REASONS = {"stop_sequence": "stop", "cancelled": "length"}
"""Finish reasons of the engine that have another name in the API, each with this name."""


class CompletionWriter:
    """Writes `n` responses to each prompt of a request, as chat or as text completions.

    If `has_logprobs`, the responses have log-probabilities of tokens.
    """

    def __init__(self, model: str, asked: ServedRequest, n: int, has_logprobs: bool) -> None:
        is_chat = asked.conversation is not None
        self._kind = "chat.completion" if is_chat else "text_completion"
        self._chunk_kind = "chat.completion.chunk" if is_chat else self._kind
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._model = model
        self._body = asked.body
        self._warnings = asked.ignored.warnings
        self._prompts = 1 if is_chat else len(asked.prompts)
        self._choices: list[ChatChoice | TextChoice] = []
        for _ in range(self._prompts * n):
            reader = asked.form.reader(asked.options)
            self._choices.append(
                ChatChoice(has_logprobs, reader) if is_chat else TextChoice(has_logprobs)
            )

    def events(self, index: int, event: StreamEvent) -> Iterator[bytes]:
        """Yield the chunks for an event of the response with this index."""
        choice, whole, rounds = self._choices[index], event.generation, self._body.adafuse.rounds
        while choice.opening:
            yield self._chunk(index, choice.opening.pop(), {})
        played = [] if event.round is None else [event.round]
        part = choice.part(event.text, event.reply_prefix, whole, played)
        reason = part.pop("finish_reason", None)
        last = event if whole is None else None
        yield self._chunk(index, part, wire.chunk(event.round, last, (), rounds=rounds))
        if whole is not None:
            warnings = [*self._warnings, *choice.warnings]
            extension = wire.chunk(None, event, warnings, rounds=rounds)
            yield self._chunk(index, {**choice.nothing, "finish_reason": reason}, extension)

    def ending(self, generations: Sequence[Generation]) -> Iterator[bytes]:
        """Yield the usage of all responses, if the client wants it, and the last event."""
        if self._body.stream_options.include_usage:
            total = total_usage(generations, self._prompts)
            frame = self._frame([], {"usage": total.model_dump()}, is_chunk=True)
            yield sent_event({**frame, "usage": openai_usage(total)})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        return sent_event(error.body)

    def response(self, results: Sequence[Any]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed, from generations or from scores."""
        total, warnings, written = total_usage(results, self._prompts), [*self._warnings], []
        if self._body.adafuse.texts is not None:
            scores = {"scores": [each.model_dump(mode="json") for each in results]}
            return {**self._frame([], scores), "usage": openai_usage(total)}
        for index, (choice, generation) in enumerate(zip(self._choices, results, strict=True)):
            extension = wire.whole(generation, rounds=self._body.adafuse.rounds)
            written.append({"index": index, **choice.whole(generation), EXTENSION: extension})
            warnings += choice.warnings
        extension = {"usage": total.model_dump(), **({"warnings": warnings} if warnings else {})}
        return {**self._frame(written, extension), "usage": openai_usage(total)}

    def _chunk(self, index: int, part: dict[str, Any], extension: dict[str, Any]) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **part}
        return sent_event(self._frame([choice], extension, is_chunk=True))

    def _frame(
        self, choices: list[dict[str, Any]], extension: dict[str, Any], *, is_chunk: bool = False
    ) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._chunk_kind if is_chunk else self._kind,
            "model": self._model,
            "choices": choices,
            **({EXTENSION: extension} if extension else {}),
        }


@dataclass
class ChatChoice:
    """One reply to a conversation. It has log-probabilities of tokens if `has_logprobs`.

    Attributes:
        nothing: the content of a chunk without text.
        opening: contents of the chunks before the first text. The writer removes what it sends.
        calls: how many complete tool calls the reply has so far.
        is_broken: whether the client has received pieces of an invalid tool call.
        warnings: what is wrong with the reply.
    """

    nothing: ClassVar[Mapping[str, Any]] = {"delta": {}}

    has_logprobs: bool
    reader: ReplyReader
    opening: list[dict[str, Any]] = field(
        default_factory=lambda: [{"delta": {"role": "assistant", "content": ""}}]
    )
    calls: int = 0
    is_broken: bool = False
    warnings: list[str] = field(default_factory=list)

    def part(
        self, text: str, prefix: str, end: Generation | None, rounds: Sequence[Round]
    ) -> dict[str, Any]:
        """Return a chunk's content: the next text, which `rounds` wrote. See `ReplyReader.add`."""
        delta = self.reader.add(text, prefix, end)
        self.warnings += delta.warnings
        calls = []
        for part in delta.parts:
            if isinstance(part, CallPiece):
                call: dict[str, Any] = {"index": part.number}
                function = {"arguments": part.arguments}
                if part.name is not None:
                    call |= {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
                    function["name"] = part.name
                calls.append({**call, "function": function})
            self.calls += isinstance(part, ToolCall)
            self.is_broken |= isinstance(part, InvalidToolCall)
        written: dict[str, Any] = {"content": delta.content}
        if delta.reasoning:
            written["reasoning_content"] = delta.reasoning
        if calls:
            written["tool_calls"] = calls
        choice: dict[str, Any] = {"delta": written, "logprobs": None}
        if self.has_logprobs and rounds:
            choice["logprobs"] = {**openai_logprobs(rounds), "refusal": None}
        if end is not None:
            reason = FINISH_REASONS.get(end.finish_reason, end.finish_reason)
            if self.is_broken:
                reason = "length"  # so that no client takes the calls for whole
            elif self.calls and reason == "stop":
                reason = "tool_calls"
            choice["finish_reason"] = reason
        return choice

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the whole response as an item of ``choices``."""
        text, prefix = generation.text, generation.reply_prefix
        choice = self.part(text, prefix, generation, generation.rounds)
        message = {"role": "assistant", **choice.pop("delta"), "refusal": None}
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            for call in message["tool_calls"]:
                del call["index"]
        return {"message": message, **choice}


@dataclass
class TextChoice:
    """One completion of a prompt, with the methods of `ChatChoice` that the writer calls."""

    nothing: ClassVar[Mapping[str, Any]] = {"text": ""}

    has_logprobs: bool
    opening: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _offset: int = 0

    def part(
        self, text: str, _prefix: str, end: Generation | None, rounds: Sequence[Round]
    ) -> dict[str, Any]:
        """Return the content of a chunk: the next text, and in the last chunk the finish reason."""
        choice: dict[str, Any] = {"text": text, "logprobs": None}
        if end is not None:
            choice["finish_reason"] = FINISH_REASONS.get(end.finish_reason, end.finish_reason)
        if not self.has_logprobs or not rounds:
            return choice
        tokens = openai_logprobs(rounds)["content"]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token["token"])
        choice["logprobs"] = {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens
            ],
            "text_offset": offsets,
        }
        return choice

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the whole response as an item of ``choices``."""
        return self.part(generation.text, "", generation, generation.rounds)
