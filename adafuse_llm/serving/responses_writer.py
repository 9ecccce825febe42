"""Write responses in the form of OpenAI's Responses API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from adafuse_llm import wire
from adafuse_llm.adapters.logprobs import openai_logprobs
from adafuse_llm.adapters.reply import CUT, Part, Reasoning, Text, ToolCall
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.results import Generation, StreamEvent
from adafuse_llm.serving.errors import BUSY, ApiError
from adafuse_llm.serving.http import to_json
from adafuse_llm.serving.openai_completions import arguments_of, largest_member, total_usage
from adafuse_llm.serving.openai_requests import ServedRequest
from adafuse_llm.wire import EXTENSION

CountTokens = Callable[[str, str], int]
"""A function from a member's name and a text to the number of its tokens."""


class ResponseWriter:
    """Writes one response: as events while it grows, or as a whole.

    Args:
        model: the model's name, as the request has it.
        asked: the request.
        config: the options of the engine for the request.
        leader: member whose log-probabilities the response has; None for none.
        count_tokens: counts the tokens of reasoning.
    """

    def __init__(
        self,
        model: str,
        asked: ServedRequest,
        config: AdaFuseConfig,
        leader: str | None,
        count_tokens: CountTokens,
    ) -> None:
        self._asked = asked
        self._leader = leader
        self._warnings = [*asked.ignored.warnings]
        self._count_tokens = count_tokens
        self._reader = asked.form.reader()
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._tokens: list[dict[str, Any]] = []
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "model": model,
            "parallel_tool_calls": asked.form.parallel,
            "previous_response_id": None,
            "reasoning": {"effort": asked.effort, "summary": None},
            "store": False,
            "temperature": config.temperature,
            "top_logprobs": config.top_logprobs,
            "top_p": config.top_p,
            "truncation": "disabled",
            **(asked.echoed or {}),
        }

    def events(self, index: int, event: StreamEvent) -> Iterator[bytes]:  # noqa: ARG002
        """Yield the events for an event of the engine."""
        if not self._sequence:
            for kind in ("created", "in_progress"):
                yield self._sent(f"response.{kind}", response=self._response("in_progress"))
        tokens: list[dict[str, Any]] = []
        if self._leader is not None and event.round is not None:
            tokens = openai_logprobs([event.round], self._leader)["content"]
            self._tokens += tokens
        whole = event.generation
        delta = self._reader.read(event)
        for part in delta.parts:
            yield from self._add(part, tokens)
            tokens = tokens if isinstance(part, Reasoning) else []
        self._warnings += delta.warnings
        if whole is not None:
            if not self._output:  # clients expect a message
                yield from self._begin("message")
            yield from self._close("incomplete" if whole.finish_reason in CUT else "completed")

    def ending(self, generations: Sequence[Generation]) -> Iterator[bytes]:
        """Yield the last event, which has the whole response."""
        response = self._whole(generations[0])
        yield self._sent(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails."""
        described = error.body["error"]
        code = "rate_limit_exceeded" if error.type == BUSY else "server_error"
        failed = {"code": code, "message": described["message"]}
        begun = b""
        if not self._sequence:  # clients expect this event before all others
            begun = self._sent("response.created", response=self._response("in_progress"))
        return begun + self._sent(
            "response.failed", response=self._response("failed", error=failed)
        )

    def response(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the whole response, if it is not streamed."""
        (generation,) = generations
        if self._leader is not None:
            self._tokens = openai_logprobs(generation.rounds, self._leader)["content"]
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
        """Return the usage of the member with the most tokens."""
        usage = total_usage([generation], 1)
        member = largest_member(usage)
        prompt, completion = usage.prompt_tokens[member], usage.completion_tokens[member]
        thought = generation.reasoning
        reasoning = min(self._count_tokens(member, thought), completion) if thought else 0
        cached = {"cached_tokens": usage.cached_tokens[member], "cache_write_tokens": 0}
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached,
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + completion,
        }

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
        """Yield the events for a part of the reply."""
        if isinstance(part, (Text, Reasoning)):
            kind = "message" if isinstance(part, Text) else "reasoning"
            if self._open is None or self._open["type"] != kind:
                yield from self._close("completed")
                yield from self._begin(kind)
            assert self._open is not None, "an item has begun"
            self._open["content"][0]["text"] += part.text
            shown = {"logprobs": tokens} if kind == "message" else {}
            yield self._at(f"{_delta_of(kind)}.delta", content_index=0, delta=part.text, **shown)
            return
        assert isinstance(part, ToolCall), "malformed calls are text"
        yield from self._close("completed")
        name, arguments = part.name, arguments_of(part)
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": f"call_{uuid.uuid4().hex}",
            "name": name,
            "arguments": "",
        }
        self._open = item
        self._output.append(item)
        yield self._item("added")
        item["arguments"] = arguments
        yield self._at("function_call_arguments.delta", delta=arguments)
        yield self._at("function_call_arguments.done", name=name, arguments=arguments)
        item["status"] = "completed"
        yield self._item("done")
        self._open = None

    def _begin(self, kind: str) -> Iterator[bytes]:
        """Begin a message, or reasoning."""
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self._open = item
        self._output.append(item)
        yield self._item("added")
        yield self._at("content_part.added", content_index=0, part=part)
        item["content"].append(part)

    def _close(self, status: str) -> Iterator[bytes]:
        """End the message or the reasoning that is open, if any."""
        if (item := self._open) is None:
            return
        part = item["content"][0]
        if item["type"] == "message":
            part["logprobs"] = self._tokens
        shown = {"logprobs": self._tokens} if item["type"] == "message" else {}
        kind = _delta_of(item["type"])
        yield self._at(f"{kind}.done", content_index=0, text=part["text"], **shown)
        yield self._at("content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self._item("done")
        self._open = None

    # Events ------------------------------------------------------------------------------------

    def _item(self, what: str) -> bytes:
        place = len(self._output) - 1
        return self._sent(f"response.output_item.{what}", output_index=place, item=self._open)

    def _at(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the item that is open."""
        assert self._open is not None, "an item is open"
        place = {"item_id": self._open["id"], "output_index": len(self._output) - 1}
        return self._sent(f"response.{kind}", **place, **fields)

    def _sent(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _delta_of(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"
