"""The handle of open requests: it starts them, gives their events, and stops them."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing
from typing import Any, Generic, TypeVar

from adafuse_llm.errors import InvalidOptionError, RequestCancelledError
from adafuse_llm.results import Generation, Scores, StreamEvent

E = TypeVar("E", bound=StreamEvent | Scores)

Deliver = Callable[[int, Any], None]
"""A function that receives the number of a response and its next event, or the error that ended
it. Any thread can call it. It does not block."""

CLOSED = "the run was closed before its requests were complete"


class Run(Generic[E]):
    """The responses (or scores) to the requests in one call of `Engine.open`, as they grow.

    Iterate over it once, with ``for`` or ``async for``. Each item is the number of a response and
    its next event. With the option ``n``, a request has n responses with consecutive numbers. A
    response ends with a `StreamEvent` that has a ``generation``, or with `Scores`. The iteration
    ends after the last response, or raises the first error. When it ends, or nothing refers to the
    run any more, the engine stops the requests that are not complete.

    Args:
        size: number of the responses.
        start: starts all requests, before the first item.
        stop: stops incomplete requests. Any thread may call it. It must not refer to the run.
    """

    def __init__(
        self,
        size: int,
        start: Callable[[Deliver], None],
        stop: Callable[[], None],
    ) -> None:
        self.size = size
        self._start = start
        self._stop = weakref.finalize(self, stop)
        self._stop.atexit = False
        self._deliver: Deliver | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Generator[tuple[int, E], None, None]:
        events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._begin(lambda index, event: events.put((index, event)))
        with closing(self):
            unfinished = self.size
            while unfinished:
                index, event = events.get()
                unfinished -= _is_last(event)
                yield index, event

    async def __aiter__(self) -> AsyncGenerator[tuple[int, E], None]:
        loop, stop = asyncio.get_running_loop(), self._stop
        events: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        def deliver(index: int, event: Any) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, (index, event))
            except RuntimeError:  # the event loop is closed, so nobody waits any longer
                stop()

        self._begin(deliver)
        with closing(self):
            unfinished = self.size
            while unfinished:
                index, event = await events.get()
                unfinished -= _is_last(event)
                yield index, event

    def results(self) -> list[Any]:
        """Wait for all requests. Return their generations (or scores) in order."""
        done = dict(result for item in self if (result := _result(item)) is not None)
        return [done[index] for index in range(self.size)]

    async def aresults(self) -> list[Any]:
        """Like `results`, but does not block the event loop."""
        done = dict([result async for item in self if (result := _result(item)) is not None])
        return [done[index] for index in range(self.size)]

    def close(self) -> None:
        """Stop the requests that are not complete. Any thread can call this, also more than once.

        An iteration that waits for an event ends with `RequestCancelledError`.
        """
        self._stop()
        with self._lock:
            deliver, self._deliver = self._deliver, lambda *_: None
        if deliver is not None:
            deliver(0, RequestCancelledError(CLOSED))

    def _begin(self, deliver: Deliver) -> None:
        with self._lock:
            if self._deliver is not None:
                raise RequestCancelledError(f"{CLOSED}, or it is read a second time")
            self._deliver = deliver
            self._start(deliver)


def check_one_response(run: Run[Any]) -> None:
    """Raise an InvalidOptionError if a run has several responses, which a stream cannot have."""
    if run.size > 1:
        raise InvalidOptionError(
            f"option 'n': a stream has one response; got {run.size}. Leave the option out, or "
            "make a call that does not stream."
        )


def with_alternatives(generations: Sequence[Generation]) -> Generation:
    """Return the first of the responses to a request, with the others as its alternatives."""
    first, *others = generations
    return first.model_copy(update={"alternatives": tuple(others)}) if others else first


def _is_last(event: StreamEvent | Scores | BaseException) -> bool:
    # whether the event completes a response; an error of a request is raised
    if isinstance(event, BaseException):
        raise event
    return isinstance(event, Scores) or event.generation is not None


def _result(item: tuple[int, StreamEvent | Scores]) -> tuple[int, Any] | None:
    index, event = item
    result = event if isinstance(event, Scores) else event.generation
    return None if result is None else (index, result)
