"""Read bodies of requests, send streams of events, and notice clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from adafuse_llm.adapters.reply import read_json
from adafuse_llm.serving.access import read_body
from adafuse_llm.serving.bodies import Ignored
from adafuse_llm.serving.errors import ApiError, invalid
from adafuse_llm.serving_config import ServingConfig

T = TypeVar("T")

SILENT_SECONDS = 15.0
"""Seconds of silence after which a stream sends a comment. Many proxies close a connection that is
silent for 60 seconds."""

COMMENT = b": waiting\n\n"
"""A comment between two events. Clients skip it."""

JSON = "application/json"

DONE = b"data: [DONE]\n\n"
"""The last event of a stream of completions."""


async def read_object(
    request: Request, read: Callable[[dict[str, Any], Ignored], T], config: ServingConfig
) -> T:
    """Return what `read` makes of the JSON object in a body. `read` runs in a thread."""
    body = await read_body(request, config)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise ApiError(
            415,
            f"the body must have the header 'Content-Type: {JSON}'; got {kind[:100]!r}",
            code="unsupported_media_type",
        )

    def parse() -> T:
        try:
            value = read_json(body.decode("utf-8"))
            if not isinstance(value, dict):
                raise ValueError("it is not an object")
        except (ValueError, RecursionError) as error:  # from JSON, its numbers, or Unicode
            raise invalid(f"the body cannot be read: {error}", code="invalid_json") from None
        return read(value, Ignored())

    return await anyio.to_thread.run_sync(parse)


def event(data: Mapping[str, Any], kind: str = "") -> bytes:
    """Return data as a server-sent event of the type `kind`; without a type if that is empty."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {text}\n\n".encode()


async def with_pauses(items: AsyncGenerator[T, None]) -> AsyncGenerator[T | None, None]:
    """Yield the items of a generator, and None after every `SILENT_SECONDS` without an item."""
    async with aclosing(items):
        waiting = asyncio.ensure_future(anext(items, None))
        try:
            while True:
                await asyncio.wait({waiting}, timeout=SILENT_SECONDS)
                if not waiting.done():
                    yield None
                elif (item := waiting.result()) is None:
                    return
                else:
                    yield item
                    waiting = asyncio.ensure_future(anext(items, None))
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel the work if the client leaves.

    Call this only after the whole body was read: then `receive` returns only if the client leaves.

    Raises:
        ClientDisconnect: the client left.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class StreamResponse(StreamingResponse):
    """A stream of events: `first`, and then `parts`, a generator that the response closes."""

    def __init__(self, first: bytes, parts: AsyncGenerator[bytes, None]) -> None:
        async def content() -> AsyncGenerator[bytes, None]:
            yield first
            async for part in parts:
                yield part

        # these headers keep proxies from holding back events
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content(), headers=headers, media_type="text/event-stream")
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Close its generator at the end, and also if the client leaves."""
        async with aclosing(self._parts):
            await super().__call__(scope, receive, send)
