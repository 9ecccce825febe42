"""The routes of `RemoteEngine`, which give everything that an engine gives."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typing_extensions import override

from adafuse_llm.client import wire
from adafuse_llm.config import GRAMMARS
from adafuse_llm.errors import (
    AdaFuseError,
    EngineClosedError,
    InvalidInputError,
    QueueFullError,
    RequestCancelledError,
    ServerNotReadyError,
)
from adafuse_llm.request import Request as EngineRequest
from adafuse_llm.run import Run
from adafuse_llm.serving.access import request_id
from adafuse_llm.serving.errors import NOT_READY, ApiError, api_error, invalid, without_paths
from adafuse_llm.serving.http import (
    JSON,
    JSON_LINES,
    StreamResponse,
    read_object,
    unless_disconnected,
)
from adafuse_llm.serving.service import Service
from adafuse_llm.text.conversation import Conversation

logger = logging.getLogger(__name__)

Form = TypeVar("Form", bound=BaseModel)

Handler = Callable[[Service, Request], Awaitable[Response]]


def routes(service: Service) -> list[Route]:
    """Return the routes of `RemoteEngine`."""
    posts: dict[str, Handler] = {
        wire.OPEN: _open,
        wire.CANCEL: _cancel,
        wire.CHECK: _check,
        wire.TOKENS: _tokens,
    }
    return [
        Route(wire.INFO, partial(_answer, service, _info), methods=["GET"]),
        *(
            Route(path, partial(_answer, service, handle), methods=["POST"])
            for path, handle in posts.items()
        ),
    ]


async def _answer(service: Service, handle: Handler, request: Request) -> Response:
    """Return the response of a handler. Errors have the form that clients raise them from."""
    try:
        return await handle(service, request)
    except (ApiError, AdaFuseError) as error:  # the client raises it
        described = api_error(error)
        failure = _failure(error)
        kind = {"adafuse": failure.model_dump(exclude_defaults=True)} if failure.kind else {}
        return JSONResponse({**described.body, **kind}, described.status, described.headers)


def _failure(error: Exception) -> wire.Failure:
    """Return the form of an error."""
    ended = (EngineClosedError, RequestCancelledError)  # by the server
    if not isinstance(error, AdaFuseError) or isinstance(error, ended):
        return wire.Failure(message=api_error(error).message)
    if isinstance(error, QueueFullError):  # its message names an option that clients do not have
        error = QueueFullError(api_error(error).message)
    return wire.Failure.of(error, str if isinstance(error, InvalidInputError) else without_paths)


async def _read(request: Request, kind: type[Form]) -> Form:
    """Return the body of a request.

    Raises:
        ApiError: it has another form.
    """
    try:
        return await read_object(request, kind.model_validate)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(map(str, problem["loc"]))
        raise invalid(f"field {name!r}: {problem['msg']}", name) from None


def _written(form: BaseModel) -> Response:
    return Response(form.model_dump_json(), media_type=JSON)


async def _info(service: Service, request: Request) -> Response:
    engine = service.view(request.query_params.get("strategy"))
    return _written(
        wire.Info(
            protocol=wire.PROTOCOL,
            members=engine.member_info,
            strategy=engine.strategy.name,
            config=engine.config.model_dump(exclude_defaults=True),
            can_enforce=engine.can_enforce,
        )
    )


async def _check(service: Service, request: Request) -> Response:
    asked = await _read(request, wire.CheckRequest)

    def check(cancel: threading.Event) -> None:
        engine = service.view(asked.strategy)
        engine.check_grammar(cancel=cancel, **service.check_limits(engine, asked.options))

    await unless_disconnected(request.receive, service.result(check, has_grammar=True))
    return _written(wire.Done())


async def _tokens(service: Service, request: Request) -> Response:
    asked = await _read(request, wire.TokensRequest)

    def count(_: threading.Event) -> dict[str, list[int]]:
        engine, text = service.view(asked.strategy), asked.text or ""
        if asked.input is None:
            options = service.check_limits(engine, asked.options, characters=len(text))
            return engine.encode_text(text, **options)
        conversation, characters = _read_input(asked.input)
        options = service.check_limits(engine, asked.options, characters=characters)
        return engine.encode_prompt(asked.input.prompt, messages=conversation, **options)

    done = await unless_disconnected(request.receive, service.result(count))
    return _written(wire.Tokens(tokens=done))


def _read_input(given: wire.Input) -> tuple[Conversation | None, int]:
    """Return the conversation, if it is one, and the size of the input."""
    conversation = given.conversation()
    if conversation is None:
        return None, len(given.prompt or "")
    return conversation, conversation.characters


async def _cancel(service: Service, request: Request) -> Response:
    """End requests of a stream. Nothing happens if they have ended."""
    asked = await _read(request, wire.CancelRequest)
    found = service.cancel_stream(asked.stream, asked.requests)
    if not found and service.cancel_elsewhere is not None:
        found = await service.cancel_elsewhere(asked.stream, asked.requests)
    return _written(wire.Cancelled(found=found))


async def _open(service: Service, request: Request) -> Response:
    """Start a stream. Its requests are checked before the response begins."""
    lines = _lines(service, await _read(request, wire.OpenRequest))
    first = await unless_disconnected(request.receive, anext(lines))
    return StreamResponse(
        lines, first, media_type=JSON_LINES, send_timeout=service.config.send_timeout
    )


async def _lines(service: Service, asked: wire.OpenRequest) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream.

    Before the first line, an error is raised. Then it is the last line.
    """
    stream, begun = uuid.uuid4().hex, False
    work = partial(_opened, service, asked)
    forms = any(each.options.get(name) is not None for each in asked.requests for name in GRAMMARS)
    timeouts = [each.timeout for each in asked.requests if each.timeout is not None]
    limit = service.time_limit(min(timeouts, default=None))
    try:
        async with service.admitted(work, has_grammar=forms, limit=limit) as (
            members,
            flags,
            run,
        ):
            begun, service.streams[stream] = True, flags
            yield _line(wire.Head(stream=stream, size=run.size, members=members))
            packed = wire.Events()
            async with aclosing(service.events(run)) as events:
                async for index, event in events:
                    yield _line(packed.pack(index, event))
    except Exception as error:
        if not begun:
            raise
        if not isinstance(error, (ApiError, AdaFuseError)):
            logger.exception("request %s failed", request_id())
        yield _line(wire.Line(failure=_failure_of_stream(service, error)))
    finally:
        service.streams.pop(stream, None)


def _opened(
    service: Service, asked: wire.OpenRequest, cancel: threading.Event
) -> tuple[tuple[str, ...], list[threading.Event], Run[Any]]:
    """Check and open the requests of a stream.

    Returns:
        The names of the members, a flag that cancels each request, and the run.
    """
    engine = service.view(asked.strategy)
    flags: list[threading.Event] = [_Flag(cancel) for _ in asked.requests]
    requests = []
    for each, flag in zip(asked.requests, flags, strict=True):
        conversation, characters = _read_input(each)
        options = service.check_limits(
            engine,
            each.options,
            inputs=len(flags),
            characters=characters + sum(map(len, each.texts or ())),
        )
        if each.is_cancelled:
            flag.set()
        requests.append(
            EngineRequest(
                prompt=each.prompt,
                messages=conversation,
                texts=each.texts,
                stops=each.stops,
                options=options,
                timeout=service.time_limit(each.timeout),
                cancel=flag,
            )
        )
    return engine.members, flags, engine.open(requests)


class _Flag(threading.Event):
    """The flag that cancels one request of a stream.

    Args:
        all_requests: the flag that cancels all of them.
    """

    def __init__(self, all_requests: threading.Event) -> None:
        super().__init__()
        self._all = all_requests

    @override
    def is_set(self) -> bool:
        return super().is_set() or self._all.is_set()


def _failure_of_stream(service: Service, error: Exception) -> wire.Failure:
    """Return the form of an error in a stream."""
    if isinstance(error, RequestCancelledError) and service.is_ready:  # by the client
        return wire.Failure.of(error, str)
    if api_error(error).code == NOT_READY:
        return wire.Failure(kind=ServerNotReadyError.__name__, message=api_error(error).message)
    return _failure(error)


def _line(form: BaseModel) -> bytes:
    return form.model_dump_json(exclude_defaults=True).encode() + b"\n"
