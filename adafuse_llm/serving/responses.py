"""The Responses API of OpenAI. The server stores nothing between two requests."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from adafuse_llm.adapters.conversation import Turn
from adafuse_llm.adapters.logprobs import openai_logprobs, openai_usage
from adafuse_llm.adapters.reply import CUT, CallPiece, Part, Reasoning, Text, ToolCall
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.errors import short_repr
from adafuse_llm.interface import Engine
from adafuse_llm.remote import wire
from adafuse_llm.remote.wire import EXTENSION
from adafuse_llm.results import Generation, StreamEvent, Usage
from adafuse_llm.serving.bodies import (
    NO_STORE,
    Conversational,
    Ignored,
    Nested,
    ServedRequest,
    converse,
    parse,
    read_options,
    readable,
)
from adafuse_llm.serving.errors import ApiError, invalid
from adafuse_llm.serving.sse import event as sent_event


class _TextField(Nested):
    format: dict[str, Any] | None = None


class _ReasoningField(Nested):
    effort: str | None = None


class _ResponseBody(Conversational):
    PROMPT: ClassVar[str] = "input"
    FORM: ClassVar[str] = "text.format"
    LENGTH: ClassVar[str] = "max_output_tokens"

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    text: _TextField = _TextField()
    reasoning: _ReasoningField = _ReasoningField()
    include: list[str] = Field(default_factory=list)


def read_response(body: dict[str, Any], ignored: Ignored) -> ServedRequest:
    """Read a request to the Responses API."""
    parsed = parse(_ResponseBody, body, ignored)
    metadata = body.get("metadata")
    options, names = read_options(parsed, ignored)
    if (n := options.setdefault("n", 1)) != 1:
        raise invalid(f"n must be 1 in the Responses API; got {short_repr(n)}", names["n"])
    asked = ServedRequest(parsed, ignored, options, names, effort=parsed.reasoning.effort)
    turns = read_input(parsed.input, ignored)
    if parsed.instructions:
        turns.insert(0, {"role": "system", "content": parsed.instructions})
    converse(asked, parsed, turns, parsed.text.format)
    if "message.output_text.logprobs" in parsed.include:
        options["logprobs"] = True
    asked.echoed = {
        "instructions": parsed.instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "tools": parsed.tools,
        "tool_choice": parsed.tool_choice or "auto",
        "parallel_tool_calls": parsed.parallel_tool_calls,
        "metadata": metadata if isinstance(metadata, dict) else {},
        "text": {"format": parsed.text.format or {"type": "text"}},
    }
    return asked


def read_input(sent: str | Sequence[dict[str, Any]], ignored: Ignored) -> list[Turn]:
    """Return the conversation in the input of a request.

    A call joins the turn of the reply or call before it. Reasoning belongs to the reply or call
    after it, which then begins a new turn.
    """
    if isinstance(sent, str):
        return [{"role": "user", "content": sent}]
    turns: list[Turn] = []
    reasoning = ""
    for number, each in enumerate(sent):
        place = f"input.{number}"
        item = _known(each, place)
        kind, call_id = item["type"], item.get("call_id")
        if kind == "reasoning":
            reasoning = _reasoning(item)
            continue
        last: Turn = turns[-1] if turns else {}
        turn: Turn
        if kind == "message":
            role = item.get("role", "")
            turn = {"role": role, "content": readable(item.get("content"))}
        elif kind == "function_call":
            call: Any = {name: item.get(name) for name in ("name", "arguments")}
            call["id"] = call_id
            if last.get("role") == "assistant" and not reasoning:
                last["tool_calls"] = [*(last.get("tool_calls") or ()), call]
                continue
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "function_call_output":
            output = readable(item.get("output"), is_result=True)
            turn = {"role": "tool", "tool_call_id": call_id, "content": output}
        else:
            ignored.add(place, f"members cannot read its type {short_repr(kind)}")
            continue
        if turn["role"] == "assistant" and reasoning:
            turn["reasoning"] = reasoning
        reasoning = ""
        turns.append(turn)
    return turns


def _known(item: dict[str, Any], place: str) -> dict[str, Any]:
    """Return an input item. Calls and outputs of other types of tools become those of functions."""
    kind = item.get("type") or "message"
    if kind == "item_reference":
        raise invalid(f"{place} is an item_reference, but {NO_STORE}. Send the item itself.", place)
    name, _, role = str(kind).rpartition("_")
    if kind == "function_call" or role not in ("call", "output") or not item.get("call_id"):
        return {**item, "type": kind}
    if role == "output":
        return {**item, "type": "function_call_output"}
    arguments = json.dumps({"input": item.get("input", item.get("action"))}, ensure_ascii=False)
    return {"name": name, **item, "type": "function_call", "arguments": arguments}


def _reasoning(item: Mapping[str, Any]) -> str:
    for parts in (item.get("content"), item.get("summary")):
        listed = parts if isinstance(parts, list) else []
        texts = [part.get("text") for part in listed if isinstance(part, Mapping)]
        if joined := "\n\n".join(text for text in texts if isinstance(text, str)):
            return joined
    return ""


def response_usage(counts: Usage) -> dict[str, Any]:
    """Return the counts of the member with the most tokens, in the form of the Responses API."""
    usage = openai_usage(counts)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""By type of item, the middle part of the names of its text events: ``response.PART.delta``."""


class ResponseWriter:
    """Writes one response: as events while it grows, or as a whole.

    `engine` counts the tokens of reasoning. The response repeats some options of `config`.
    """

    def __init__(
        self,
        model: str,
        asked: ServedRequest,
        engine: Engine,
        config: AdaFuseConfig,
        has_logprobs: bool,
    ) -> None:
        self._asked = asked
        self._has_logprobs = has_logprobs
        self._warnings = [*asked.ignored.warnings]
        self._engine = engine
        self._reader = asked.form.reader(asked.options)
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] = {}
        self._tokens: list[dict[str, Any]] = []
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "reasoning": {"effort": asked.effort, "summary": None},
            "store": False,
            "temperature": config.temperature,
            "top_logprobs": config.top_logprobs,
            "top_p": config.top_p,
            **(asked.echoed or {}),
        }

    def events(self, index: int, event: StreamEvent) -> Iterator[bytes]:  # noqa: ARG002
        """Yield the server-sent events for an event of the engine."""
        if not self._sequence:
            for kind in ("created", "in_progress"):
                yield self._sent(f"response.{kind}", response=self._response("in_progress"))
        tokens: list[dict[str, Any]] = []
        if self._has_logprobs and event.round is not None:
            tokens = openai_logprobs([event.round])["content"]
            self._tokens += tokens
        whole = event.generation
        delta = self._reader.add(event.text, event.reply_prefix, whole)
        for part in delta.parts:
            yield from self._add(part, tokens)
            tokens = tokens if isinstance(part, Reasoning) else []
        self._warnings += delta.warnings
        if whole is not None:
            if not self._output:  # clients expect a message
                yield from self._begin_text("message")
            yield from self._close("incomplete" if whole.finish_reason in CUT else "completed")

    def ending(self, generations: Sequence[Generation]) -> Iterator[bytes]:
        """Yield the last event, which has the whole response."""
        response = self._whole(generations[0])
        yield self._sent(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""
        described = error.body["error"]
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"code": code, "message": described["message"]}
        begun = b""
        if not self._sequence:  # clients expect this event before all others
            begun = self._sent("response.created", response=self._response("in_progress"))
        return begun + self._sent(
            "response.failed", response=self._response("failed", error=failed)
        )

    def response(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        (generation,) = generations
        if self._has_logprobs:
            self._tokens = openai_logprobs(generation.rounds)["content"]
        text, prefix = generation.text, generation.reply_prefix
        whole = StreamEvent(text=text, round=None, generation=generation, reply_prefix=prefix)
        for _ in self.events(0, whole):
            pass
        return self._whole(generation)

    def _whole(self, generation: Generation) -> dict[str, Any]:
        is_cut = generation.finish_reason in CUT
        extension = {
            "usage": generation.usage.model_dump(),
            **wire.whole(generation, rounds=self._asked.body.adafuse.rounds),
        }
        if self._warnings:
            extension["warnings"] = self._warnings
        return self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=self._usage(generation),
            **{EXTENSION: extension},
        )

    def _usage(self, generation: Generation) -> dict[str, Any]:
        usage, thought = response_usage(generation.usage), generation.reasoning
        if thought:
            tokens = self._engine.encode_text(thought, use=tuple(generation.usage.prompt_tokens))
            reasoning = min(max(map(len, tokens.values())), usage["output_tokens"])
            usage["output_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "output": self._output,
            **fields,
        }

    # Items -------------------------------------------------------------------------------------

    def _add(self, part: Part, tokens: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        if isinstance(part, (Text, Reasoning)):
            kind = "message" if isinstance(part, Text) else "reasoning"
            if self._open.get("type") != kind:
                yield from self._close("completed")
                yield from self._begin_text(kind)
            self._open["content"][0]["text"] += part.text
            shown = {"logprobs": tokens} if kind == "message" else {}
            yield self._at(f"{TEXTS[kind]}.delta", content_index=0, delta=part.text, **shown)
            return
        if isinstance(part, CallPiece):
            if part.name is not None:
                yield from self._close("completed")
                ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex}"}
                call = {"type": "function_call", "name": part.name, "arguments": ""}
                yield self._begin({**ids, **call})
            self._open["arguments"] += part.arguments
            yield self._at("function_call_arguments.delta", delta=part.arguments)
            return
        is_whole = isinstance(part, ToolCall)
        if is_whole:
            call = {name: self._open[name] for name in ("name", "arguments")}
            yield self._at("function_call_arguments.done", **call)
        yield self._end("completed" if is_whole else "incomplete")

    def _begin_text(self, kind: str) -> Iterator[bytes]:
        item: dict[str, Any] = {"type": kind, "content": []}
        if kind == "message":
            item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        yield self._begin(item)
        yield self._at("content_part.added", content_index=0, part=part)
        self._open["content"].append(part)

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._open:
            return
        (part,) = self._open["content"]
        kind, shown = self._open["type"], {}
        if kind == "message":
            part["logprobs"] = shown["logprobs"] = self._tokens
        yield self._at(f"{TEXTS[kind]}.done", content_index=0, text=part["text"], **shown)
        yield self._at("content_part.done", content_index=0, part=part)
        yield self._end(status)

    def _begin(self, item: dict[str, Any]) -> bytes:
        self._open = {**item, "status": "in_progress"}
        self._output.append(self._open)
        return self._item("added")

    def _end(self, status: str) -> bytes:
        self._open["status"] = status
        ended, self._open = self._item("done"), {}
        return ended

    # Events ------------------------------------------------------------------------------------

    def _item(self, what: str) -> bytes:
        place = len(self._output) - 1
        return self._sent(f"response.output_item.{what}", output_index=place, item=self._open)

    def _at(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._open["id"], "output_index": len(self._output) - 1}
        return self._sent(f"response.{kind}", **place, **fields)

    def _sent(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sent_event(data, kind)
