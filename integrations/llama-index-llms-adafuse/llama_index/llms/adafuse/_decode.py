"""The decode of one request. It yields chunks of the response and emits events for the rounds."""

from __future__ import annotations

import functools
import inspect
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import llama_index_instrumentation.dispatcher as instrumentation
from llama_index.core.base.llms.types import LogProb
from llama_index.core.instrumentation.span import active_span_id
from llama_index.llms.adafuse._logprobs import token_logprobs
from llama_index.llms.adafuse.errors import aadapter_errors, adapter_errors
from llama_index.llms.adafuse.events import (
    AdaFuseGenerationEndEvent,
    AdaFuseGenerationStartEvent,
    AdaFuseRoundEvent,
)
from llama_index.llms.adafuse.raw import AdaFuseRaw
from llama_index_instrumentation import get_dispatcher

from adafuse_llm import AdaFuseConfig, Engine, Generation, Round, StreamEvent
from adafuse_llm.summary import Summary, record

dispatcher = get_dispatcher(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """A piece of a response.

    Attributes:
        text: the text so far.
        delta: the new text.
        raw: the rounds that produced it.
        logprobs: if the call requests log-probabilities, those of the leading member's tokens in
            the rounds.
        reply_prefix: text with which the members' chat templates began the response.
    """

    text: str
    delta: str
    raw: AdaFuseRaw
    logprobs: list[list[LogProb]] | None = None
    reply_prefix: str = ""


class Decode:
    """The decode of one request.

    Create the object while the span of the LLM call is open. If the call returns a stream,
    llama-index-core closes that span and resets the active span before the stream is read. The
    constructor therefore opens a span for the decode, and saves the context for its events.

    Args:
        engine: the engine that decodes.
        request: ``prompt`` or ``messages``, and options, as keywords of `Engine.stream`.
        emit_events: whether to open a span and emit events.
    """

    def __init__(self, engine: Engine, request: dict[str, Any], *, emit_events: bool) -> None:
        self._engine = engine
        self._request = request
        self._cancel = threading.Event()
        self._lock = threading.Lock()
        self._span: str | None = None
        self._config = engine.config.override(_options(request))
        if emit_events:
            self._enter_span(self._config)

    def result(self) -> Chunk:
        """Return the whole response; of several responses (option `n`), the first."""
        if self._config.n > 1:
            return self._whole(self._generate())
        *_, final = self._events(self._stream())
        return self._whole(final.generation)

    async def aresult(self) -> Chunk:
        """Return the whole response without blocking the event loop."""
        if self._config.n > 1:
            return self._whole(await self._agenerate())
        async for event in self._aevents(await self._astream()):
            final = event
        return self._whole(final.generation)

    def chunks(self) -> Generator[Chunk, None, None]:
        """Return the chunks of the response, one per committed span and at least one."""
        _register(self)
        return self._chunks(self._stream())

    async def achunks(self) -> AsyncGenerator[Chunk, None]:
        """Return the chunks of the response without blocking the event loop."""
        _register(self)
        return self._achunks(await self._astream())

    def end(self, error: BaseException | None = None, generation: Generation | None = None) -> None:
        """Stop the decode and close its span. Further calls have no effect."""
        self._cancel.set()
        with self._lock:
            span, self._span = self._span, None
        if span is None:
            return
        if error is None or isinstance(error, GeneratorExit):
            dispatcher.span_exit(span, self._bound_args, self._engine, generation)
        else:
            dispatcher.span_drop(span, self._bound_args, self._engine, error)

    def _chunks(self, stream: Iterator[StreamEvent]) -> Generator[Chunk, None, None]:
        text = ""
        for event in self._events(stream):
            text += event.text
            yield self._piece(text, event)

    async def _achunks(
        self, stream: AsyncGenerator[StreamEvent, None]
    ) -> AsyncGenerator[Chunk, None]:
        text = ""
        async with aclosing(self._aevents(stream)) as events:
            async for event in events:
                text += event.text
                yield self._piece(text, event)

    def _piece(self, text: str, event: StreamEvent) -> Chunk:
        raw = AdaFuseRaw.of_chunk(event)
        return Chunk(text, event.text, raw, self._logprobs(raw.rounds), event.reply_prefix)

    def _whole(self, generation: Generation | None) -> Chunk:
        assert generation is not None, "a decode ends with its generation or an error"
        raw, text = AdaFuseRaw.of_response(generation), generation.text
        return Chunk(text, text, raw, self._logprobs(raw.rounds), generation.reply_prefix)

    def _logprobs(self, rounds: Sequence[Round]) -> list[list[LogProb]] | None:
        if not self._config.logprobs and not self._config.top_logprobs:
            return None
        return token_logprobs(rounds, self._config.leading_member(self._engine.members))

    def _generate(self) -> Generation:
        """Return the first of several responses, which are decoded together."""
        try:
            generation = self._engine.generate(**self._request, cancel=self._cancel)
        except BaseException as error:
            self.end(error)
            raise
        self._emit_all(generation)
        return generation

    async def _agenerate(self) -> Generation:
        """Return the first of several responses without blocking the event loop."""
        try:
            generation = await self._engine.agenerate(**self._request, cancel=self._cancel)
        except BaseException as error:
            self.end(error)
            raise
        self._emit_all(generation)
        return generation

    def _stream(self) -> Iterator[StreamEvent]:
        """Return the engine's stream. An invalid request raises an error before any computation."""
        try:
            return self._engine.stream(**self._request, cancel=self._cancel)
        except BaseException as error:
            self.end(error)
            raise

    async def _astream(self) -> AsyncGenerator[StreamEvent, None]:
        """Return the engine's stream. An invalid request raises an error before any computation."""
        try:
            self._config.check_one_response()
            return _without_index(
                await self._engine.open_stream(**self._request, cancel=self._cancel)
            )
        except BaseException as error:
            self.end(error)
            raise

    def _events(self, stream: Iterator[StreamEvent]) -> Generator[StreamEvent, None, None]:
        try:
            for event in stream:
                self._emit(event)
                yield event
        except BaseException as error:
            self.end(error)
            raise

    async def _aevents(
        self, stream: AsyncGenerator[StreamEvent, None]
    ) -> AsyncGenerator[StreamEvent, None]:
        try:
            async with aclosing(stream):
                async for event in stream:
                    self._emit(event)
                    yield event
        except BaseException as error:
            self.end(error)
            raise

    def _enter_span(self, config: AdaFuseConfig) -> None:
        """Open the decode's span as a child of the active span."""
        self._context = copy_context()
        self._span = f"AdaFuse.decode-{uuid.uuid4()}"
        self._bound_args = inspect.signature(Engine.stream).bind(self._engine, **self._request)
        parent, tags = active_span_id.get(), _active_tags()
        dispatcher.span_enter(self._span, self._bound_args, self._engine, parent, tags)
        self._context.run(active_span_id.set, self._span)
        self._context.run(
            dispatcher.event,
            AdaFuseGenerationStartEvent(
                span_id=self._span,
                members=config.use or self._engine.members,
                options=config.model_dump(mode="json"),
            ),
        )

    def _emit_all(self, generation: Generation) -> None:
        """Emit all events of a whole response."""
        for each in generation.rounds:
            self._emit(StreamEvent(text=each.text, round=each))
        self._emit(StreamEvent(text="", round=None, generation=generation))

    def _emit(self, event: StreamEvent) -> None:
        """Emit the event of a round. At the end, also emit the end event and close the span."""
        if self._span is None:
            return
        if event.round is not None:
            round_event = AdaFuseRoundEvent(span_id=self._span, **record(event.round))
            self._context.run(dispatcher.event, round_event)
        if (generation := event.generation) is not None:
            end = AdaFuseGenerationEndEvent(
                span_id=self._span,
                text=generation.text,
                finish_reason=generation.finish_reason,
                usage=generation.usage,
                summary=Summary.of(generation.rounds),
                seed=generation.seed,
            )
            self._context.run(dispatcher.event, end)
            self.end(generation=generation)


def _active_tags() -> dict[str, Any]:
    """Return the tags of the active span. Without LlamaIndex's internal variable, there are none.

    Its public `instrument_tags` only sets tags.
    """
    variable = getattr(instrumentation, "active_instrument_tags", None)
    return {} if variable is None else dict(variable.get())


async def _without_index(
    events: AsyncGenerator[tuple[int, StreamEvent], None],
) -> AsyncGenerator[StreamEvent, None]:
    """Yield the events of the only response."""
    async with aclosing(events):
        async for _, event in events:
            yield event


def _options(request: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in request.items() if key not in ("prompt", "messages")}


# Streams that stop when they are closed ---------------------------------------------------------
# llama-index-core wraps each stream in its own generator. Closing this generator raises an
# exception inside it. If a handler stores the exception, as an event recorder does, the generator's
# frame and its stream stay alive, and the stream continues to compute. The generator that users get
# therefore ends the decode itself.

_STARTED: ContextVar[list[Decode] | None] = ContextVar("adafuse_decodes", default=None)


def _register(decode: Decode) -> None:
    started = _STARTED.get()
    if started is not None:
        started.append(decode)


def ends_when_closed(
    method: Callable[P, Generator[T, None, None]],
) -> Callable[P, Generator[T, None, None]]:
    """Decorate a streaming method to end its decode when its generator is closed or deleted.

    The method and its generator raise the errors of `adapter_errors`.
    """

    @functools.wraps(method)
    @adapter_errors()
    def streaming(*args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        started: list[Decode] = []
        token = _STARTED.set(started)
        try:
            stream = method(*args, **kwargs)
        finally:
            _STARTED.reset(token)
        return _end_with(_relay(stream, started[-1]), started[-1])

    return streaming


def aends_when_closed(
    method: Callable[P, Coroutine[Any, Any, AsyncGenerator[T, None]]],
) -> Callable[P, Coroutine[Any, Any, AsyncGenerator[T, None]]]:
    """Decorate an asynchronous streaming method in the same way as `ends_when_closed`."""

    @functools.wraps(method)
    @aadapter_errors
    async def streaming(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        started: list[Decode] = []
        token = _STARTED.set(started)
        try:
            stream = await method(*args, **kwargs)
        finally:
            _STARTED.reset(token)
        return _end_with(_arelay(stream, started[-1]), started[-1])

    return streaming


def _relay(stream: Generator[T, None, None], decode: Decode) -> Generator[T, None, None]:
    try:
        with adapter_errors():
            yield from stream
    finally:
        decode.end()


async def _arelay(stream: AsyncGenerator[T, None], decode: Decode) -> AsyncGenerator[T, None]:
    try:
        with adapter_errors():
            async with aclosing(stream):
                async for item in stream:
                    yield item
    finally:
        decode.end()


G = TypeVar("G", Generator[Any, None, None], AsyncGenerator[Any, None])


def _end_with(stream: G, decode: Decode) -> G:
    """Return the stream; end its decode when it is deleted, even if it was never advanced."""
    weakref.finalize(stream, decode.end).atexit = False
    return stream
