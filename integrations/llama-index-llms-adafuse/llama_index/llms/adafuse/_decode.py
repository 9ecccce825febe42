"""The decode of one request. It yields chunks of the response and emits events for the rounds."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import LogProb
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.span import active_span_id
from llama_index.llms.adafuse.events import (
    AdaFuseGenerationEndEvent,
    AdaFuseGenerationStartEvent,
    AdaFuseRoundEvent,
)
from llama_index.llms.adafuse.raw import AdaFuseRaw
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags

from adafuse_llm import ContextWindowError, Engine, Generation, Request, Round, StreamEvent
from adafuse_llm.adapters.logprobs import openai_logprobs
from adafuse_llm.run import check_one_response, with_alternatives
from adafuse_llm.summary import Summary, record

dispatcher = get_dispatcher(__name__)

PACKING = (
    "If a query engine packed this prompt, set Settings.prompt_helper = llm.prompt_helper() before "
    "you create it, because LlamaIndex's own helper does not count the members' tokens."
)


@dataclass(frozen=True)
class Chunk:
    """A piece of a response.

    Attributes:
        text: the text so far.
        delta: the new text.
        raw: the rounds that produced it.
        logprobs: if the call requests log-probabilities, those of the reported member's tokens in
            the rounds.
        reply_prefix: text with which the members' chat templates began the response.
    """

    text: str
    delta: str
    raw: AdaFuseRaw
    logprobs: list[list[LogProb]] | None = None
    reply_prefix: str = ""


class Decode:
    """The decode of one request, in a span of its own.

    llama-index-core closes the span of an LLM call before a stream is read. The decode's span is
    its child, and stays open until the decode ends, fails or is left.

    Args:
        engine: the engine that decodes.
        request: the request. Of several responses (option `n`), the first one counts.
        emit_events: whether to open a span and emit events.
    """

    def __init__(self, engine: Engine, request: Request, *, emit_events: bool) -> None:
        self._engine = engine
        self._requests = [request]
        self._config = engine.config.override(request.options)
        self._done: dict[int, Generation] = {}
        self._span = f"AdaFuse.decode-{uuid.uuid4()}" if emit_events else None
        self._context = copy_context()  # the one of the call, for all events of a stream
        self._text = ""

    def result(self) -> Chunk:
        """Return the whole response."""
        with self._in_span(), closing(self._engine.open(self._requests)) as run:
            for number, event in run:
                self._take(number, event, run.size)
        return self._whole()

    async def aresult(self) -> Chunk:
        """Return the whole response without blocking the event loop."""
        with self._in_span(), closing(await self._engine.aopen(self._requests)) as run:
            async for number, event in run:
                self._take(number, event, run.size)
        return self._whole()

    def chunks(self) -> Generator[Chunk, None, None]:
        """Return the chunks of the response, one per committed span and at least one.

        An invalid request raises an error before any computation.
        """
        events = self._events()
        next(events)
        return (self._chunk(event) for event in events if event)

    async def achunks(self) -> AsyncGenerator[Chunk, None]:
        """Return the chunks of the response without blocking the event loop."""
        events = self._aevents()
        await anext(events)
        return (self._chunk(event) async for event in events if event)

    def _events(self) -> Generator[StreamEvent | None, None, None]:
        """Yield None as soon as the request is accepted, then the events of its response."""
        with self._in_span(), closing(self._engine.open(self._requests)) as run:
            check_one_response(run)
            yield None
            for number, event in run:
                self._take(number, event, run.size)
                yield event

    async def _aevents(self) -> AsyncGenerator[StreamEvent | None, None]:
        with self._in_span(), closing(await self._engine.aopen(self._requests)) as run:
            check_one_response(run)
            yield None
            async with aclosing(aiter(run)) as events:
                async for number, event in events:
                    self._take(number, event, run.size)
                    yield event

    def _take(self, number: int, event: StreamEvent, size: int) -> None:
        """Keep a complete response. Emit the events of the first response."""
        if event.generation is not None:
            self._done[number] = event.generation
        if number == 0 and event.round is not None:
            self._emit(AdaFuseRoundEvent, **record(event.round))
        if len(self._done) == size:
            generation = self._generation()
            self._emit(
                AdaFuseGenerationEndEvent,
                text=generation.text,
                strategy=generation.strategy,
                finish_reason=generation.finish_reason,
                usage=generation.usage,
                summary=Summary.of(generation.rounds),
                seed=generation.seed,
            )

    @contextmanager
    def _in_span(self) -> Iterator[None]:
        """Open a span as a child of the active one, and close it. Say what to do about prompts."""
        bound_args = inspect.signature(Engine.open).bind(self._engine, self._requests)
        span: Any = {"id_": self._span, "bound_args": bound_args, "instance": self._engine}
        if self._span:
            parent, tags = active_span_id.get(), dict(active_instrument_tags.get())
            dispatcher.span_enter(**span, parent_id=parent, tags=tags)
            self._context.run(active_span_id.set, self._span)
        self._emit(
            AdaFuseGenerationStartEvent,
            members=self._config.use or self._engine.members,
            options=self._config.model_dump(mode="json"),
        )
        try:
            yield
        except BaseException as error:
            if self._span and not isinstance(error, GeneratorExit):
                dispatcher.span_drop(**span, err=error)
            elif self._span:
                dispatcher.span_exit(**span)
            if isinstance(error, ContextWindowError):
                raise ContextWindowError(f"{error} {PACKING}") from error
            raise
        if self._span:
            dispatcher.span_exit(**span, result=self._generation())

    def _emit(self, kind: type[BaseEvent], **fields: Any) -> None:
        if self._span:
            self._context.run(lambda: dispatcher.event(kind(**fields)))

    def _chunk(self, event: StreamEvent) -> Chunk:
        self._text += event.text
        raw = AdaFuseRaw.of_chunk(event)
        return Chunk(self._text, event.text, raw, self._logprobs(raw.rounds), event.reply_prefix)

    def _whole(self) -> Chunk:
        generation = self._generation()
        raw, text = AdaFuseRaw.of_response(generation), generation.text
        return Chunk(text, text, raw, self._logprobs(raw.rounds), generation.reply_prefix)

    def _generation(self) -> Generation:
        """Return the first response, with the others as its alternatives."""
        return with_alternatives([self._done[number] for number in sorted(self._done)])

    def _logprobs(self, rounds: Sequence[Round]) -> list[list[LogProb]] | None:
        """Return one list for each token of the reported member, if the request asks for them.

        The committed token is first, followed by the other likeliest tokens in descending order of
        probability.
        """
        if self._config.counted_logprobs is None:
            return None
        member = self._config.reported_member(self._engine.members)
        return [_candidates(token) for token in openai_logprobs(rounds, member)["content"]]


def _candidates(token: Mapping[str, Any]) -> list[LogProb]:
    names = ("token", "logprob")
    others = [
        top for top in token["top_logprobs"] if any(top[name] != token[name] for name in names)
    ]
    return [
        LogProb(token=each["token"], logprob=each["logprob"], bytes=each["bytes"])
        for each in (token, *others)
    ]
