"""Requests to a server. They run on an event loop in a thread of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from adafuse_llm.client import wire
from adafuse_llm.errors import (
    AdaFuseError,
    ContextWindowError,
    EngineClosedError,
    InvalidInputError,
    InvalidOptionError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
    ServerNotReadyError,
)
from adafuse_llm.forks import after_fork
from adafuse_llm.results import Generation, Scores, StreamEvent
from adafuse_llm.run import Deliver

T = TypeVar("T")
Form = TypeVar("Form", bound=BaseModel)

Outcome = StreamEvent | Scores | BaseException
"""The next event of a response, or the error that ended it."""

CANCEL_SECONDS = 0.05
"""Seconds between two looks at the event that cancels a stream."""

MAX_CANCEL_SECONDS = 2.0
"""Maximum seconds between two requests to cancel a stream."""

SEND_SECONDS = 60.0
"""Maximum seconds for the server to take a part of a request."""

KEEP_ALIVE: list[tuple[int, int, int]] = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]
"""Socket options that detect within half a minute that the machine of the server is gone."""

MAX_LINE_BYTES = 64 * 2**20
"""Maximum bytes of a line of a stream. The longest lines have all rounds of a response."""

INVALID = (400, 413, 415, 422)
"""Status codes for requests that cannot be used."""

NOT_READY = (502, 503)
"""Status codes of a server that is not ready, or of a proxy whose server does not answer."""

BY_STATUS: dict[int, type[AdaFuseError]] = {429: QueueFullError, 504: RequestTimeoutError}
"""Classes of errors by status code."""

CLOSED = "this engine is closed"


class CancelEvent(Protocol):
    """An event that cancels a stream, such as a `threading.Event`."""

    def is_set(self) -> bool:
        """Whether the stream is to end."""
        ...


Owners = Sequence[int]
"""Number of the request of each response."""

Cancels = Sequence[CancelEvent | None]
"""The event that cancels each request, or each response; None for none."""


class Connection:
    """The connections to one server. Any thread can use them.

    Args:
        url: address of the server.
        api_key: key for the server, or None.
        connect_timeout: maximum seconds to connect.
    """

    def __init__(self, url: str, api_key: str | None, connect_timeout: float) -> None:
        self._url = url
        self._api_key = api_key
        self._connect_timeout = connect_timeout
        self._closed = False
        after_fork(self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def close(self, timeout: float | None = None) -> None:
        """End all requests and close the connections.

        Args:
            timeout: maximum seconds to wait for the end.
        """
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
            thread.join(timeout)

    def get(self, path: str, kind: type[Form], **query: str) -> Form:
        """Return the answer to a request that sends nothing.

        Raises:
            AdaFuseError: the server cannot be used, or refuses the request.
        """
        return self._run(lambda client: self._get(client, path, kind, query))

    def post(self, path: str, body: BaseModel, kind: type[Form]) -> Form:
        """Return the answer to a request.

        Raises:
            AdaFuseError: the server cannot be used, or refuses the request.
        """
        return self._run(lambda client: self._post(client, path, body, kind))

    def open(self, body: wire.OpenRequest, owners: Owners, cancels: Cancels) -> Stream:
        """Start a stream. When this returns, its requests have been checked.

        Args:
            body: the requests.
            owners: number of the request of each response.
            cancels: the events that cancel the requests.

        Raises:
            AdaFuseError: the server cannot be used, or refuses the requests.
        """
        return self._run(lambda client: self._open(client, body, owners, cancels))

    async def aopen(self, body: wire.OpenRequest, owners: Owners, cancels: Cancels) -> Stream:
        """Like `open`, but do not block the event loop."""
        work = self._submit(lambda client: self._open(client, body, owners, cancels))
        return await asyncio.wrap_future(work)

    def _run(self, work: _Work[T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _submit(self, work: _Work[T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if self._closed:
                raise EngineClosedError(f"{CLOSED}; create a new one")
            if self._thread is None:
                self._thread = _LoopThread(self._client())
                weakref.finalize(self, self._thread.close)
            return self._thread.submit(work)

    def _client(self) -> httpx.AsyncClient:
        headers = {"Accept-Encoding": "identity"}  # compression would delay the events of a stream
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return httpx.AsyncClient(
            base_url=self._url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=self._connect_timeout, write=SEND_SECONDS),
            transport=httpx.AsyncHTTPTransport(
                socket_options=KEEP_ALIVE,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            ),
        )

    async def _get(
        self, client: httpx.AsyncClient, path: str, kind: type[Form], query: dict[str, str]
    ) -> Form:
        with self._naming_server():
            answer = await client.get(path, params=query, timeout=self._connect_timeout)
            return self._checked(answer, kind)

    async def _post(
        self, client: httpx.AsyncClient, path: str, body: BaseModel, kind: type[Form]
    ) -> Form:
        with self._naming_server():
            return self._checked(await client.send(_request(client, path, body)), kind)

    async def _open(
        self, client: httpx.AsyncClient, body: wire.OpenRequest, owners: Owners, cancels: Cancels
    ) -> Stream:
        with self._naming_server():
            answer = await client.send(_request(client, wire.OPEN, body), stream=True)
            try:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    raise self._failure(answer)
                lines = _lines(answer)
                head = self._parsed(await anext(lines, b""), wire.Head)
                if head.size != len(owners):
                    raise self._unknown_form()
            except BaseException:
                await answer.aclose()
                raise
        events = _Events(head.size)
        of_response = [cancels[owner] for owner in owners]
        reader = asyncio.ensure_future(self._read(events, lines, answer, of_response))
        # not in the reader itself: a task that is cancelled before it begins runs no code
        reader.add_done_callback(events.end)
        for cancel in {id(each): each for each in cancels if each is not None}.values():
            numbers = tuple(number for number, each in enumerate(cancels) if each is cancel)
            ask = _request(
                client, wire.CANCEL, wire.CancelRequest(stream=head.stream, requests=numbers)
            )
            watch = asyncio.ensure_future(_cancel_once_set(client, ask, cancel, events))
            watch.add_done_callback(events.fail)
            reader.add_done_callback(partial(_cancel_task, watch))
        return Stream(events, head, asyncio.get_running_loop(), reader)

    async def _read(
        self,
        events: _Events,
        lines: AsyncGenerator[bytes, None],
        answer: httpx.Response,
        cancels: Cancels,
    ) -> None:
        """Deliver the events of a stream until it ends. `cancels` has an event per response.

        Raises:
            AdaFuseError: it ended before all responses were complete.
        """
        packed, unfinished = wire.Events(), set(range(events.unfinished))
        try:
            with self._naming_server():
                async for text in lines:
                    line = self._parsed(text, wire.Line)
                    if (event := packed.unpack(line)) is None:
                        failure = line.failure or wire.Failure()
                        raise failure.error() or self._error(f"failed: {failure.message}")
                    if line.index not in unfinished:
                        raise self._unknown_form()
                    if isinstance(event, Scores) or event.generation is not None:
                        unfinished.remove(line.index)
                    cancel = cancels[line.index]
                    if _is_cancelled(event) and (cancel is None or not cancel.is_set()):
                        raise self._error("stopped before the response was complete")
                    events.deliver(line.index, event)
            if events.unfinished:
                raise self._error("ended the stream before the response was complete")
        finally:
            await answer.aclose()

    def _checked(self, answer: httpx.Response, kind: type[Form]) -> Form:
        if answer.status_code != httpx.codes.OK:
            raise self._failure(answer)
        return self._parsed(answer.content, kind)

    def _parsed(self, text: bytes, kind: type[Form]) -> Form:
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            raise self._unknown_form() from error

    def _unknown_form(self) -> ServerError:
        return self._error(
            "answers in an unknown form. It must be 'adafuse serve' of the version that is "
            "installed here"
        )

    def _failure(self, answer: httpx.Response) -> AdaFuseError:
        """Return the error that an answer describes."""
        try:
            body = answer.json()
            failure = wire.Failure.model_validate(body.get("adafuse", {}))
            message, code, param = (body["error"][key] for key in ("message", "code", "param"))
        except (ValueError, TypeError, KeyError, AttributeError):
            if answer.status_code in NOT_READY:
                return self._not_ready(
                    f"answers with the status {answer.status_code}. Try again later"
                )
            return self._error(
                f"answers with the status {answer.status_code}. Check that it is the address of "
                "'adafuse serve', without a path such as /v1"
            )
        if (error := failure.error()) is not None:
            return error
        if (kind := _kind(answer.status_code, code, param)) is not None:
            return kind(message)
        return self._refusal(answer.status_code, message)

    def _refusal(self, status: int, message: str) -> ServerError:
        """Return the error for a request that the server did not take."""
        if status in NOT_READY:
            return self._not_ready(f"is not ready: {message}")
        if status == httpx.codes.UNAUTHORIZED:
            reason = "needs a key" if self._api_key is None else "refuses the key"
            return self._error(f"{reason}. Pass api_key=..., or set ADAFUSE_API_KEY")
        return self._error(f"refuses the request: {message}")

    def _error(self, reason: str) -> ServerError:
        return ServerError(self._named(reason))

    def _not_ready(self, reason: str) -> ServerNotReadyError:
        return ServerNotReadyError(self._named(reason))

    def _named(self, reason: str) -> str:
        return f"the server at {self._url} {reason}"

    @contextlib.contextmanager
    def _naming_server(self) -> Iterator[None]:
        """Raise errors of the connection as errors that name the server."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadTimeout) as error:
            raise self._not_ready(
                f"does not answer ({_described(error)}). Start it with 'adafuse serve', or check "
                "the address"
            ) from error
        except httpx.RequestError as error:
            raise self._error(f"closed the connection ({_described(error)})") from error


class Stream(NamedTuple):
    """The events of a stream, and what stops it.

    Attributes:
        events: the events of the responses.
        head: the first line of the stream.
        loop: the event loop of the connection.
        reader: the task that reads the stream.
    """

    events: _Events
    head: wire.Head
    loop: asyncio.AbstractEventLoop
    reader: asyncio.Future[None]

    def stop(self) -> None:
        """Close the stream, unless its responses are complete. Then others use its connection."""
        if self.events.unfinished:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and its streams
                self.loop.call_soon_threadsafe(self.reader.cancel)


class _Events:
    """Events that wait until somebody wants them.

    Args:
        size: number of the responses.
    """

    def __init__(self, size: int) -> None:
        self.unfinished = size
        self._waiting: list[tuple[int, Outcome]] = []
        self._deliver: Deliver | None = None
        self._lock = threading.Lock()

    def start(self, deliver: Deliver) -> None:
        """Deliver all events from now on, the waiting ones first."""
        with self._lock:
            self._deliver = deliver
            for index, event in self._waiting:
                deliver(index, event)
            self._waiting.clear()

    def deliver(self, index: int, event: Outcome) -> None:
        """Deliver an event, or let it wait."""
        with self._lock:
            self.unfinished -= isinstance(event, Scores) or _generation(event) is not None
            if self._deliver is None:
                self._waiting.append((index, event))
            else:
                self._deliver(index, event)

    def fail(self, task: asyncio.Future[None]) -> None:
        """Deliver the exception of a task of the stream. The consumer then stops the stream."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.deliver(0, error)

    def end(self, reader: asyncio.Future[None]) -> None:
        """Deliver what ended the reader of the stream, if the responses are not complete."""
        if reader.cancelled():
            self.deliver(0, EngineClosedError(CLOSED))  # not read if the consumer has stopped
        self.fail(reader)


class _LoopThread:
    """A thread with an event loop and a client.

    Args:
        client: the client.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._process = os.getpid()
        self._closes = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="adafuse-client", daemon=True
        )
        self._thread.start()

    def submit(self, work: _Work[T]) -> concurrent.futures.Future[T]:
        """Run some work on the event loop."""
        return asyncio.run_coroutine_threadsafe(self._unless_closed(work), self._loop)

    async def _unless_closed(self, work: _Work[T]) -> T:
        try:
            return await work(self._client)
        except asyncio.CancelledError:
            if self._closes:
                raise EngineClosedError(CLOSED) from None
            raise

    def close(self) -> None:
        """End all work and the thread, without waiting for the end."""
        if self._process == os.getpid() and not self._closes:
            self._closes = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        self._loop.stop()

    def join(self, timeout: float | None) -> None:
        """Wait for the end of the thread, unless this is the thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)


_Work = Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]]


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _kind(status: int, code: str | None, param: str | None) -> type[AdaFuseError] | None:
    """Return the class of an error that has only a status and a code; None for `ServerError`."""
    if status in INVALID:
        if code == "context_length_exceeded":
            return ContextWindowError
        return InvalidInputError if param is None else InvalidOptionError
    return BY_STATUS.get(status)


async def _cancel_once_set(
    client: httpx.AsyncClient, ask: httpx.Request, cancel: CancelEvent, events: _Events
) -> None:
    """Ask the server to end requests once an event is set.

    A load balancer may send the request to another server than the stream. So it is repeated until
    it has reached the server of the stream.
    """
    while not cancel.is_set():  # noqa: ASYNC110  # threads set the event
        await asyncio.sleep(CANCEL_SECONDS)
    pause = CANCEL_SECONDS
    while events.unfinished:
        with contextlib.suppress(httpx.RequestError, ValidationError):  # the stream fails, too
            answer = await client.send(ask)
            if wire.Cancelled.model_validate_json(answer.content).found:
                return
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_CANCEL_SECONDS)


def _cancel_task(task: asyncio.Future[None], _: asyncio.Future[None]) -> None:
    """Cancel a task when another one has ended."""
    task.cancel()


def _request(client: httpx.AsyncClient, path: str, body: BaseModel) -> httpx.Request:
    try:
        content = body.model_dump_json(exclude_defaults=True)
    except PydanticSerializationError as error:
        raise InvalidInputError(f"the request cannot be written as JSON: {error}") from error
    return client.build_request(
        "POST", path, content=content, headers={"Content-Type": "application/json"}
    )


async def _lines(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the whole lines of an answer."""
    rest = bytearray()
    async for part in answer.aiter_bytes():
        *whole, last = part.split(b"\n")
        for line in whole:
            yield bytes(rest + line)
            rest.clear()
        rest += last
        if len(rest) > MAX_LINE_BYTES:
            raise httpx.ReadError(f"a line has more than {MAX_LINE_BYTES:,} bytes")


def _generation(event: Outcome) -> Generation | None:
    return event.generation if isinstance(event, StreamEvent) else None


def _is_cancelled(event: Outcome) -> bool:
    generation = _generation(event)
    return generation is not None and generation.finish_reason == "cancelled"


def _described(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
