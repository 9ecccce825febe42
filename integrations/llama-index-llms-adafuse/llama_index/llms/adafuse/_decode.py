"""Decode one request: yield chunks of the response, and emit events for the rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import closing
from typing import Generic, TypeVar

from llama_index.core.base.llms.types import LogProb
from llama_index.core.instrumentation.span import active_span_id
from llama_index.llms.adafuse.events import AdaFuseRoundEvent
from llama_index.llms.adafuse.raw import AdaFuseRaw
from llama_index_instrumentation import get_dispatcher

from adafuse_llm import Engine, Generation, Request, Round, StreamEvent
from adafuse_llm.adapters.logprobs import openai_logprobs
from adafuse_llm.run import check_one_response, with_alternatives
from adafuse_llm.summary import record

dispatcher = get_dispatcher(__name__)

R = TypeVar("R")


Convert = Callable[[StreamEvent, AdaFuseRaw, list[list[LogProb]] | None], R]
"""A function that turns an event, its raw data and log-probabilities into LlamaIndex's response.
Per committed token, a list has its log-probability, then those of the likeliest others; or None."""

Prepared = tuple[Engine, Request, Convert[R]]


class Decode(Generic[R]):
    """Decodes one request, into a whole response or into a stream.

    `prepare` loads members and compiles grammars, so asynchronous methods call it in a thread.
    With `round_events`, each round becomes an event in the span of the LLM call.
    """

    def __init__(self, prepare: Callable[[], Prepared[R]], *, round_events: bool) -> None:
        self._prepare = prepare
        self._round_events = round_events
        self._done: dict[int, Generation] = {}
        self._span = active_span_id.get()

    def result(self) -> R:
        """Return the whole response."""
        for _ in self._events():
            pass
        return self._whole()

    async def aresult(self) -> R:
        """Return the whole response without blocking the event loop."""
        async for _ in self._aevents():
            pass
        return self._whole()

    def stream(self) -> Generator[R, None, None]:
        """Return the parts of the response, one per committed span and at least one.

        An invalid request raises an error before the decoding begins.
        """
        events = self._events(streams=True)
        next(events)
        return (self._converted(event, [event.round]) for event in events if event)

    async def astream(self) -> AsyncGenerator[R, None]:
        """Return the parts of the response without blocking the event loop."""
        events = self._aevents(streams=True)
        await anext(events)
        return (self._converted(event, [event.round]) async for event in events if event)

    def _events(self, *, streams: bool = False) -> Generator[StreamEvent | None, None, None]:
        """Yield None as soon as the request is accepted, then the events of its responses."""
        engine, requests = self._prepared()
        with closing(engine.open(requests)) as run:
            if streams:
                check_one_response(run)
            yield None
            for number, event in run:
                self._take(number, event)
                yield event

    async def _aevents(self, *, streams: bool = False) -> AsyncGenerator[StreamEvent | None, None]:
        engine, requests = await asyncio.to_thread(self._prepared)
        with closing(await engine.aopen(requests)) as run:
            if streams:
                check_one_response(run)
            yield None
            async for number, event in run:
                self._take(number, event)
                yield event

    def _take(self, number: int, event: StreamEvent) -> None:
        """Keep the response that an event completes. Report the rounds of the first response."""
        if event.generation is not None:
            self._done[number] = event.generation
        if self._round_events and number == 0 and event.round is not None:
            dispatcher.event(AdaFuseRoundEvent(**record(event.round), span_id=self._span))

    def _prepared(self) -> tuple[Engine, list[Request]]:
        engine, request, self._convert = self._prepare()
        self._config = engine.config.override(request.options)
        return engine, [request]

    def _whole(self) -> R:
        whole = with_alternatives([self._done[number] for number in sorted(self._done)])
        begun = whole.reply_prefix
        event = StreamEvent(text=whole.text, round=None, generation=whole, reply_prefix=begun)
        return self._converted(event, whole.rounds)

    def _converted(self, event: StreamEvent, played: Iterable[Round | None]) -> R:
        rounds, lists = tuple(filter(None, played)), None
        if self._config.counted_logprobs is not None:
            lists = []
            for token in openai_logprobs(rounds)["content"]:
                top = token.pop("top_logprobs")
                others = [other for other in top if other != token]
                lists.append([LogProb(**entry) for entry in (token, *others)])
        return self._convert(event, AdaFuseRaw.of(rounds, event.generation), lists)
