"""Write chat completions and completions in the form of OpenAI's API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from adafuse_llm import wire
from adafuse_llm.adapters.logprobs import openai_logprobs
from adafuse_llm.adapters.reply import ReplyDelta, ReplyReader, ToolCall
from adafuse_llm.adapters.reply_form import ReplyForm
from adafuse_llm.results import Generation, Round, Scores, StreamEvent, Usage
from adafuse_llm.serving.errors import ApiError
from adafuse_llm.serving.http import DONE
from adafuse_llm.serving.http import event as sent_event
from adafuse_llm.serving.openai_requests import ServedRequest
from adafuse_llm.wire import EXTENSION

FINISH_REASONS = {"stop_sequence": "stop", "cancelled": "length"}
"""Reasons of the engine that have another name in the API."""

CHAT_KINDS = ("chat.completion", "chat.completion.chunk")
TEXT_KINDS = ("text_completion", "text_completion")
"""Kinds of objects: whole responses, and chunks of streams."""


class Chunk(NamedTuple):
    """The part of a chunk that depends on the kind of the response.

    Attributes:
        choice: the choice.
        done: the round that committed its text, if any.
        event: the event, in the last of its chunks.
        warnings: what is wrong with the calls of the whole response, in its last chunk.
    """

    choice: dict[str, Any]
    done: Round | None = None
    event: StreamEvent | None = None
    warnings: Sequence[str] = ()


class CompletionWriter:
    """Writes chat completions and completions.

    Args:
        model: the model's name, as the request has it.
        asked: the request.
        n: number of responses to each prompt.
        leader: member whose log-probabilities the responses have; None for none.
    """

    def __init__(
        self,
        model: str,
        asked: ServedRequest,
        n: int,
        leader: str | None,
    ) -> None:
        is_chat = asked.conversation is not None
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._kinds = CHAT_KINDS if is_chat else TEXT_KINDS
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._model = model
        self._asked = asked
        self._warnings = asked.ignored.warnings
        self._prompts = 1 if is_chat else len(asked.prompts)
        self._choices: list[ChatChoice | TextChoice] = []
        for index in range(self._prompts * n):
            echo = asked.prompts[index // n] if asked.echo else ""
            self._choices.append(
                ChatChoice(index, asked.form, leader)
                if is_chat
                else TextChoice(index, leader, echo)
            )

    def events(self, index: int, event: StreamEvent) -> Iterator[bytes]:
        """Yield the chunks of a stream for an event."""
        for part in self._choices[index].chunks(event):
            yield sent_event(self._chunk(part))

    def ending(self, generations: Sequence[Generation]) -> Iterator[bytes]:
        """Yield the usage of all responses, if the client wants it, and the last event."""
        if self._asked.body.stream_options.include_usage:
            total = total_usage(generations, self._prompts)
            frame = self._frame([], {"usage": total.model_dump()}, is_chunk=True)
            yield sent_event({**frame, "usage": openai_usage(total)})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        return sent_event(error.body)

    def response(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return a response that is not streamed."""
        total = total_usage(generations, self._prompts)
        written = []
        for index, (choice, generation) in enumerate(zip(self._choices, generations, strict=True)):
            extension = wire.whole(generation, rounds=self._asked.body.adafuse.rounds)
            written.append({"index": index, **choice.whole(generation), EXTENSION: extension})
        extension = {"usage": total.model_dump()}
        if warnings := [*self._warnings, *(each for c in self._choices for each in c.warnings)]:
            extension["warnings"] = warnings
        frame = self._frame(written, extension, is_chunk=False)
        return {**frame, "usage": openai_usage(total)}

    def scored(self, scores: Sequence[Scores]) -> dict[str, Any]:
        """Return the response to a request that scores texts, with the scores of each prompt."""
        extension = {"scores": [each.model_dump(mode="json") for each in scores]}
        usage = openai_usage(total_usage(scores, self._prompts))
        return {**self._frame([], extension, is_chunk=False), "usage": usage}

    def _chunk(self, part: Chunk) -> dict[str, Any]:
        """Return a chunk of a stream with one choice."""
        warnings, rounds = [*self._warnings, *part.warnings], self._asked.body.adafuse.rounds
        extension = wire.chunk(part.done, part.event, warnings, rounds=rounds)
        return self._frame([part.choice], extension, is_chunk=True)

    def _frame(
        self, choices: list[dict[str, Any]], extension: dict[str, Any], *, is_chunk: bool
    ) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._kinds[is_chunk],
            "model": self._model,
            "choices": choices,
            **({EXTENSION: extension} if extension else {}),
        }


class ChatChoice:
    """One reply to a conversation. Its log-probabilities are those of `leader`, if any."""

    def __init__(self, index: int, form: ReplyForm, leader: str | None) -> None:
        self._index = index
        self._form = form
        self._leader = leader
        self._reader: ReplyReader | None = None
        self._calls = 0
        self.warnings: list[str] = []

    def chunks(self, event: StreamEvent) -> Iterator[Chunk]:
        """Yield the parts of the chunks for an event."""
        if self._reader is None:
            self._reader = self._form.reader()
            yield Chunk(self._part({"role": "assistant", "content": ""}))
        whole = event.generation
        delta = self._reader.read(event)
        fields = self._fields(delta)
        if fields or event.round is not None:
            part = self._part({"content": "", **fields}, self._logprobs([event.round]))
            yield Chunk(part, event.round, event if whole is None else None)
        if whole is not None:
            part = self._part({}, finish_reason=_finish_reason(whole, self._calls))
            yield Chunk(part, event=event, warnings=self.warnings)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the choice of the whole response."""
        text, prefix = generation.text, generation.reply_prefix
        whole = StreamEvent(text=text, round=None, generation=generation, reply_prefix=prefix)
        fields = self._fields(self._form.reader().read(whole))
        for call in fields.get("tool_calls", ()):
            del call["index"]
        content = fields.get("content") or (None if "tool_calls" in fields else "")
        message = {"role": "assistant", **fields, "content": content, "refusal": None}
        return {
            "message": message,
            "logprobs": self._logprobs(generation.rounds),
            "finish_reason": _finish_reason(generation, self._calls),
        }

    def _part(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _fields(self, delta: ReplyDelta) -> dict[str, Any]:
        self.warnings += delta.warnings
        fields = {
            "content": delta.content,
            "reasoning_content": delta.reasoning,
            "tool_calls": [self._call(each) for each in delta.calls if isinstance(each, ToolCall)],
        }
        return {name: value for name, value in fields.items() if value}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        index, self._calls = self._calls, self._calls + 1
        return {
            "index": index,
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_of(call)},
        }

    def _logprobs(self, rounds: Sequence[Round | None]) -> dict[str, Any] | None:
        done = [each for each in rounds if each is not None]
        if self._leader is None or not done:
            return None
        return {**openai_logprobs(done, self._leader), "refusal": None}


class TextChoice:
    """One completion of a prompt, which begins with the text `echo`."""

    def __init__(self, index: int, leader: str | None, echo: str = "") -> None:
        self._index = index
        self._leader = leader
        self._echo = echo
        self._offset = 0
        self.warnings: Sequence[str] = ()

    def chunks(self, event: StreamEvent) -> Iterator[Chunk]:
        """Yield the parts of the chunks for an event."""
        if self._echo:
            yield Chunk(self._choice(self._echo, (), None))
            self._echo = ""
        if event.text or event.round is not None:
            rounds = () if event.round is None else (event.round,)
            part = self._choice(event.text, rounds, None)
            yield Chunk(part, event.round, event if event.generation is None else None)
        if (whole := event.generation) is not None:
            yield Chunk(self._choice("", (), _finish_reason(whole)), event=event)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the choice of the whole response."""
        text = self._echo + generation.text
        return self._choice(text, generation.rounds, _finish_reason(generation))

    def _choice(self, text: str, rounds: Sequence[Round], reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(rounds)
        choice = {"text": text, "logprobs": logprobs, "finish_reason": reason}
        return {"index": self._index, **choice}

    def _logprobs(self, rounds: Sequence[Round]) -> dict[str, Any] | None:
        """Return log-probabilities in the form of completions."""
        if self._leader is None or not rounds:
            return None
        tokens = openai_logprobs(rounds, self._leader)["content"]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens
            ],
            "text_offset": offsets,
        }


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text."""
    return json.dumps(call.arguments, ensure_ascii=False)


def total_usage(generations: Sequence[Generation | Scores], prompts: int) -> Usage:
    """Return the usage of all responses to some prompts, by member. Each prompt counts once."""
    share = len(generations) // prompts
    total: dict[str, dict[str, int]] = {}
    for number, generation in enumerate(generations):
        for field, counts in generation.usage.model_dump().items():
            once = field in ("prompt_tokens", "cached_tokens") and number % share
            sums = total.setdefault(field, dict.fromkeys(counts, 0))
            for member, count in counts.items():
                sums[member] += 0 if once else count
    return Usage(**total)


def largest_member(usage: Usage) -> str:
    """Return the member whose prompt and response have the most tokens."""
    return max(
        usage.prompt_tokens,
        key=lambda member: usage.prompt_tokens[member] + usage.completion_tokens[member],
    )


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Return the usage of the member with the most tokens, in the form of OpenAI's API."""
    member = largest_member(usage)
    prompt, completion = usage.prompt_tokens[member], usage.completion_tokens[member]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens[member]},
    }


def _finish_reason(generation: Generation, calls: int = 0) -> str:
    """Return why a response with a number of tool calls ended."""
    reason: str = generation.finish_reason
    reason = FINISH_REASONS.get(reason, reason)
    return "tool_calls" if calls and reason == "stop" else reason
