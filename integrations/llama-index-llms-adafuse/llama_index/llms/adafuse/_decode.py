"""One request of an LLM: its rounds told as events, its chunks, its end."""

from __future__ import annotations

import functools
import inspect
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import aclosing
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from llama_index.core.instrumentation.span import active_span_id
from llama_index.llms.adafuse.events import (
    AdaFuseGenerationEndEvent,
    AdaFuseGenerationStartEvent,
    AdaFuseRoundEvent,
)
from llama_index.llms.adafuse.raw import AdaFuseRaw
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, Generation, StreamEvent
from adafuse_llm.summary import Summary, record

dispatcher = get_dispatcher(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """A piece of a response: the text so far, what is new, and what was decided for it."""

    text: str
    delta: str
    raw: AdaFuseRaw


class Decode:
    """One request, made while the span of the call that asks is open.

    Core closes that span as soon as a stream is handed out, and clears the active one: so a decode
    opens a span of its own at once and tells its events in the context it was made in.

    Args:
        engine: the ensemble.
        asked: ``prompt`` or ``messages``, and options.
        emit_events: whether its rounds are told at all.
    """

    def __init__(self, engine: AdaFuseEngine, asked: dict[str, Any], *, emit_events: bool) -> None:
        self._engine = engine
        self._asked = asked
        self._cancel = threading.Event()
        self._ending = threading.Lock()
        self._span: str | None = None
        config = engine.config.override(_options(asked))
        if emit_events:
            self._open(config)

    def result(self) -> Chunk:
        """The whole response."""
        *_, last = self._events(self._stream())
        return _whole(last)

    async def aresult(self) -> Chunk:
        """`result` without blocking the event loop."""
        async for event in self._aevents():
            last = event
        return _whole(last)

    def chunks(self) -> Generator[Chunk, None, None]:
        """The response span by span, at least one chunk."""
        _hand_over(self)
        return self._chunks(self._stream())

    def achunks(self) -> AsyncGenerator[Chunk, None]:
        """`chunks` without blocking the event loop."""
        _hand_over(self)
        return self._achunks()

    def end(self, error: BaseException | None = None, done: Generation | None = None) -> None:
        """Stop computing and close the span; to do so again does nothing."""
        self._cancel.set()
        with self._ending:
            span, self._span = self._span, None
        if span is None:
            return
        if error is None or isinstance(error, GeneratorExit):
            dispatcher.span_exit(span, self._said, self._engine, done)
        else:
            dispatcher.span_drop(span, self._said, self._engine, error)

    def _chunks(self, stream: Iterator[StreamEvent]) -> Generator[Chunk, None, None]:
        text = ""
        for event in self._events(stream):
            text += event.text
            yield Chunk(text, event.text, AdaFuseRaw.of_chunk(event))

    async def _achunks(self) -> AsyncGenerator[Chunk, None]:
        text = ""
        async with aclosing(self._aevents()) as events:
            async for event in events:
                text += event.text
                yield Chunk(text, event.text, AdaFuseRaw.of_chunk(event))

    def _stream(self) -> Iterator[StreamEvent]:
        """The engine's stream; what cannot be asked is refused before anything is computed."""
        try:
            return self._engine.stream(**self._asked, cancel=self._cancel)
        except BaseException as error:
            self.end(error)
            raise

    def _events(self, stream: Iterator[StreamEvent]) -> Generator[StreamEvent, None, None]:
        try:
            for event in stream:
                self._tell(event)
                yield event
        except BaseException as error:
            self.end(error)
            raise

    async def _aevents(self) -> AsyncGenerator[StreamEvent, None]:
        try:
            async for event in self._engine.astream(**self._asked, cancel=self._cancel):
                self._tell(event)
                yield event
        except BaseException as error:
            self.end(error)
            raise

    def _open(self, config: AdaFuseConfig) -> None:
        """Enter the span; its parent is the active one."""
        self._context = copy_context()
        self._span = f"AdaFuse.decode-{uuid.uuid4()}"
        self._said = inspect.signature(AdaFuseEngine.stream).bind(self._engine, **self._asked)
        parent, tags = active_span_id.get(), active_instrument_tags.get()
        dispatcher.span_enter(self._span, self._said, self._engine, parent, tags)
        self._context.run(active_span_id.set, self._span)
        self._context.run(
            dispatcher.event,
            AdaFuseGenerationStartEvent(
                span_id=self._span,
                members=config.use or self._engine.members,
                options=config.model_dump(mode="json"),
            ),
        )

    def _tell(self, event: StreamEvent) -> None:
        """Tell a round, and the end where this was the last; then the span closes."""
        if self._span is None:
            return
        if event.round is not None:
            told = AdaFuseRoundEvent(span_id=self._span, **record(event.round))
            self._context.run(dispatcher.event, told)
        if (done := event.generation) is not None:
            end = AdaFuseGenerationEndEvent(
                span_id=self._span,
                text=done.text,
                finish_reason=done.finish_reason,
                usage=done.usage,
                summary=Summary.of(done.rounds),
            )
            self._context.run(dispatcher.event, end)
            self.end(done=done)


def _options(asked: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in asked.items() if key not in ("prompt", "messages")}


def _whole(last: StreamEvent) -> Chunk:
    assert last.generation is not None, "a decode ends with its generation or an error"
    text = last.generation.text
    return Chunk(text, text, AdaFuseRaw.of_response(last.generation))


# Streams that end when they are closed ----------------------------------------------------------
# Core wraps a stream in a generator of its own. Where a handler keeps the exception that closing
# throws into that one, as recorders of events do, its frame lives on, and with it the stream: it
# would go on computing. So the generator that users get ends the decode itself.

_HANDED: ContextVar[list[Decode] | None] = ContextVar("adafuse_decodes", default=None)


def _hand_over(decode: Decode) -> None:
    handed = _HANDED.get()
    if handed is not None:
        handed.append(decode)


def ends_when_closed(
    method: Callable[P, Generator[T, None, None]],
) -> Callable[P, Generator[T, None, None]]:
    """A method that streams, whose decode ends when its generator is closed or dropped."""

    @functools.wraps(method)
    def streaming(*args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        handed: list[Decode] = []
        token = _HANDED.set(handed)
        try:
            stream = method(*args, **kwargs)
        finally:
            _HANDED.reset(token)
        return _ended(_relay(stream, handed[-1]), handed[-1])

    return streaming


def aends_when_closed(
    method: Callable[P, Coroutine[Any, Any, AsyncGenerator[T, None]]],
) -> Callable[P, Coroutine[Any, Any, AsyncGenerator[T, None]]]:
    """`ends_when_closed` for a coroutine function."""

    @functools.wraps(method)
    async def streaming(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        handed: list[Decode] = []
        token = _HANDED.set(handed)
        try:
            stream = await method(*args, **kwargs)
        finally:
            _HANDED.reset(token)
        return _ended(_arelay(stream, handed[-1]), handed[-1])

    return streaming


def _relay(stream: Generator[T, None, None], decode: Decode) -> Generator[T, None, None]:
    try:
        yield from stream
    finally:
        decode.end()


async def _arelay(stream: AsyncGenerator[T, None], decode: Decode) -> AsyncGenerator[T, None]:
    try:
        async with aclosing(stream):
            async for each in stream:
                yield each
    finally:
        decode.end()


G = TypeVar("G", Generator[Any, None, None], AsyncGenerator[Any, None])


def _ended(stream: G, decode: Decode) -> G:
    """The stream; its decode ends even where it is dropped before anything was asked of it."""
    weakref.finalize(stream, decode.end).atexit = False
    return stream
