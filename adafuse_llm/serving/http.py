"""Bodies of requests, streams of events, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from adafuse_llm.adapters.reply import read_json
from adafuse_llm.serving.errors import ApiError, invalid
from adafuse_llm.serving.openai_fields import Ignored

T = TypeVar("T")

LARGE = 32_768
"""Bytes of a body from which on reading it could hold up other requests."""

SILENT_SECONDS = 15.0
"""Seconds of silence after which a stream has a comment. Many proxies close a connection that is
silent for 60 seconds."""

COMMENT = b": waiting\n\n"
"""A comment between two events. Clients skip it."""

JSON = "application/json"

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that keep proxies from holding back events."""


async def read_object(
    request: Request, read: Callable[[dict[str, Any], Ignored], T], ignored: Ignored
) -> T:
    """Return what a request asks for: its body, a JSON object, read by `read`.

    A large body is read in a thread.

    Raises:
        ApiError: the body has another content type, or is not a JSON object; or
            `read` raised it.
        ClientDisconnect: the client left before the body was complete.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise ApiError(
            415,
            f"the body must have the header 'Content-Type: {JSON}'; got {kind[:100]!r}",
            code="unsupported_media_type",
        )
    body = await request.body()
    if len(body) < LARGE:
        return read(_object(body), ignored)
    return await asyncio.to_thread(lambda: read(_object(body), ignored))


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = read_json(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # JSON, its numbers, or Unicode
        raise invalid(f"the body cannot be read as JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(
            f"the body must be a JSON object; got {type(value).__name__}", code="invalid_json"
        )
    return value


def error_response(error: ApiError) -> Response:
    """Return the response for an error."""
    return JSONResponse(error.body, error.status, error.headers)


def event(data: Mapping[str, Any]) -> bytes:
    """Return data as a server-sent event."""
    return b"data: " + to_json(data) + b"\n\n"


def to_json(data: Mapping[str, Any]) -> bytes:
    """Return data as one line of JSON."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def with_pauses(items: AsyncGenerator[T, None]) -> AsyncGenerator[T | None, None]:
    """Yield what a generator yields, and None whenever that takes `SILENT_SECONDS`."""
    waiting = asyncio.ensure_future(anext(items, None))
    try:
        while True:
            await asyncio.wait({waiting}, timeout=SILENT_SECONDS)
            if not waiting.done():
                yield None
                continue
            if (item := waiting.result()) is None:
                return
            yield item
            waiting = asyncio.ensure_future(anext(items, None))
    finally:
        await _cancel(waiting)
        await items.aclose()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of some work; cancel the work if the client leaves.

    The whole body of the request must have been read.

    Raises:
        ClientDisconnect: the client left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            await _cancel(each)


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # nobody else asks for it


class StreamResponse(Response):
    """A stream of events, whose first part has been taken. It is closed if the client leaves.

    Starlette's own class does not close the parts.
    """

    def __init__(
        self, parts: AsyncGenerator[bytes, None], first: bytes, headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._parts = parts
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the response."""
        async with aclosing(self._parts):
            with suppress(ClientDisconnect):
                await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
