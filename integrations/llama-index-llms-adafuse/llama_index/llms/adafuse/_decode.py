"""The decode of one request. It yields chunks of the response and emits events for the rounds."""

from __future__ import annotations

import functools
import inspect
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import llama_index_instrumentation.dispatcher as instrumentation
from llama_index.core.base.llms.types import LogProb
from llama_index.core.instrumentation.span import active_span_id
from llama_index.llms.adafuse.events import (
    AdaFuseGenerationEndEvent,
    AdaFuseGenerationStartEvent,
    AdaFuseRoundEvent,
)
from llama_index.llms.adafuse.raw import AdaFuseRaw
from llama_index_instrumentation import get_dispatcher

from adafuse_llm import (
    AdaFuseConfig,
    ContextWindowError,
    Engine,
    Generation,
    Request,
    Round,
    Run,
    StreamEvent,
)
from adafuse_llm.adapters.logprobs import openai_logprobs
from adafuse_llm.run import check_one_response, with_alternatives
from adafuse_llm.summary import Summary, record

dispatcher = get_dispatcher(__name__)

P = ParamSpec("P")
T = TypeVar("T")

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
    """The decode of one request.

    Create the object while the span of the LLM call is open. If the call returns a stream,
    llama-index-core closes that span and resets the active span before the stream is read. The
    constructor therefore opens a span for the decode, and saves the context for its events.

    Args:
        engine: the engine that decodes.
        request: the request. Of several responses (option `n`), the first one counts.
        emit_events: whether to open a span and emit events.
    """

    def __init__(self, engine: Engine, request: Request, *, emit_events: bool) -> None:
        self._engine = engine
        self._requests = [request]
        self._run: Run[StreamEvent] | None = None
        self._done: dict[int, Generation] = {}
        self._lock = threading.Lock()
        self._span: str | None = None
        self._config = engine.config.override(request.options)
        if emit_events:
            self._enter_span(self._config)

    def result(self) -> Chunk:
        """Return the whole response."""
        with self._ending():
            self._run = self._engine.open(self._requests)
        for _ in self._events(self._run):
            pass
        return self._whole()

    async def aresult(self) -> Chunk:
        """Return the whole response without blocking the event loop."""
        with self._ending():
            self._run = await self._engine.aopen(self._requests)
        async for _ in self._aevents(self._run):
            pass
        return self._whole()

    def chunks(self) -> Generator[Chunk, None, None]:
        """Return the chunks of the response, one per committed span and at least one.

        An invalid request raises an error before any computation.
        """
        _register(self)
        with self._ending():
            self._run = self._engine.open(self._requests)
            check_one_response(self._run)
        return self._chunks(self._run)

    async def achunks(self) -> AsyncGenerator[Chunk, None]:
        """Return the chunks of the response without blocking the event loop."""
        _register(self)
        with self._ending():
            self._run = await self._engine.aopen(self._requests)
            check_one_response(self._run)
        return self._achunks(self._run)

    def end(self, error: BaseException | None = None, generation: Generation | None = None) -> None:
        """Stop the decode and close its span. Further calls have no effect."""
        if self._run is not None:
            self._run.close()
        with self._lock:
            span, self._span = self._span, None
        if span is None:
            return
        if error is None or isinstance(error, GeneratorExit):
            dispatcher.span_exit(span, self._bound_args, self._engine, generation)
        else:
            dispatcher.span_drop(span, self._bound_args, self._engine, error)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End the decode if an error is raised, or if nobody reads its events any more."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            if isinstance(error, ContextWindowError):
                raise ContextWindowError(f"{error} {PACKING}") from error
            raise

    def _events(self, run: Run[StreamEvent]) -> Generator[StreamEvent, None, None]:
        with self._ending():
            for number, event in run:
                self._emit(number, event, run.size)
                yield event

    async def _aevents(self, run: Run[StreamEvent]) -> AsyncGenerator[StreamEvent, None]:
        with self._ending():
            async for number, event in run:
                self._emit(number, event, run.size)
                yield event

    def _chunks(self, run: Run[StreamEvent]) -> Generator[Chunk, None, None]:
        text = ""
        for event in self._events(run):
            text += event.text
            yield self._piece(text, event)

    async def _achunks(self, run: Run[StreamEvent]) -> AsyncGenerator[Chunk, None]:
        text = ""
        async with aclosing(self._aevents(run)) as events:
            async for event in events:
                text += event.text
                yield self._piece(text, event)

    def _piece(self, text: str, event: StreamEvent) -> Chunk:
        raw = AdaFuseRaw.of_chunk(event)
        return Chunk(text, event.text, raw, self._logprobs(raw.rounds), event.reply_prefix)

    def _whole(self) -> Chunk:
        generation = self._generation()
        raw, text = AdaFuseRaw.of_response(generation), generation.text
        return Chunk(text, text, raw, self._logprobs(raw.rounds), generation.reply_prefix)

    def _generation(self) -> Generation:
        """Return the first response, with the others as its alternatives."""
        return with_alternatives([self._done[number] for number in sorted(self._done)])

    def _logprobs(self, rounds: Sequence[Round]) -> list[list[LogProb]] | None:
        if self._config.counted_logprobs is None:
            return None
        return token_logprobs(rounds, self._config.reported_member(self._engine.members))

    def _enter_span(self, config: AdaFuseConfig) -> None:
        """Open the decode's span as a child of the active span."""
        self._context = copy_context()
        self._span = f"AdaFuse.decode-{uuid.uuid4()}"
        self._bound_args = inspect.signature(Engine.open).bind(self._engine, self._requests)
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

    def _emit(self, number: int, event: StreamEvent, size: int) -> None:
        """Emit the event of a round of the first response. At the end, close the span."""
        if event.generation is not None:
            self._done[number] = event.generation
        if self._span is None:
            return
        if number == 0 and event.round is not None:
            round_event = AdaFuseRoundEvent(span_id=self._span, **record(event.round))
            self._context.run(dispatcher.event, round_event)
        if len(self._done) == size:
            generation = self._generation()
            end = AdaFuseGenerationEndEvent(
                span_id=self._span,
                text=generation.text,
                strategy=generation.strategy,
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
    """Decorate a streaming method to end its decode when its generator is closed or deleted."""

    @functools.wraps(method)
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
        yield from stream
    finally:
        decode.end()


async def _arelay(stream: AsyncGenerator[T, None], decode: Decode) -> AsyncGenerator[T, None]:
    try:
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


def token_logprobs(rounds: Sequence[Round], member: str) -> list[list[LogProb]]:
    """Return the log-probabilities of a member's committed tokens.

    Each list belongs to one token. The committed token is first, followed by the other likeliest
    tokens in descending order of probability.
    """
    tokens = []
    for token in openai_logprobs(rounds, member)["content"]:
        others = token.pop("top_logprobs")
        tokens.append([LogProb(**each) for each in (token, *(o for o in others if o != token))])
    return tokens
