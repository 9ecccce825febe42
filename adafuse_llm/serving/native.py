"""The routes of `RemoteEngine`, which give everything that an engine gives."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adafuse_llm.client import wire
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import (
    AdaFuseError,
    EngineClosedError,
    InvalidInputError,
    QueueFullError,
    RequestCancelledError,
)
from adafuse_llm.results import Scores
from adafuse_llm.serving.access import request_id
from adafuse_llm.serving.errors import ApiError, api_error, invalid, without_paths
from adafuse_llm.serving.http import (
    JSON,
    JSON_LINES,
    StreamResponse,
    read_object,
    unless_disconnected,
)
from adafuse_llm.serving.service import Events, Service, within

logger = logging.getLogger(__name__)

T = TypeVar("T")
Form = TypeVar("Form", bound=BaseModel)

Handler = Callable[[Service, Request], Awaitable[Response]]


def routes(service: Service) -> list[Route]:
    """Return the routes of `RemoteEngine`."""
    posts: dict[str, Handler] = {
        wire.STREAM: _stream,
        wire.CANCEL: _cancel,
        wire.SCORE: _score,
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
    body = await read_object(request)
    try:
        return kind.model_validate(body)
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
            pass_costs=engine.pass_costs,
        )
    )


async def _check(service: Service, request: Request) -> Response:
    asked = await _read(request, wire.CheckRequest)
    engine = service.view(asked.strategy)
    options = await asyncio.to_thread(_limited, service, engine, asked.options)
    async with service.running_until_stopped():
        await unless_disconnected(request.receive, service.check_grammar(engine, options))
    return _written(wire.Done())


async def _tokens(service: Service, request: Request) -> Response:
    asked = await _read(request, wire.TokensRequest)
    engine = service.view(asked.strategy)
    given, text = asked.input, asked.text or ""
    options = await asyncio.to_thread(
        _limited, service, engine, asked.options, () if given is None else (given,), len(text)
    )

    def count() -> dict[str, list[int]]:
        if given is None:
            return engine.encode_text(text, **options)
        return engine.encode_prompt(given.prompt, messages=given.conversation(), **options)

    return _written(wire.Tokens(tokens=await _work(service, request, count)))


async def _score(service: Service, request: Request) -> Response:
    asked = await _read(request, wire.ScoreRequest)
    work = _scored(service, asked)
    return _written(wire.Scored(scores=await unless_disconnected(request.receive, work)))


async def _scored(service: Service, asked: wire.ScoreRequest) -> tuple[Scores, ...]:
    """Score the texts of a request. No thread waits for the result."""
    engine = service.view(asked.strategy)
    texts = asked.continuations
    if len(texts) != len(asked.inputs):
        raise invalid("continuations must have a list of texts for each input", "continuations")
    characters = max((sum(map(len, each)) for each in texts), default=0)
    options = await asyncio.to_thread(
        _limited, service, engine, asked.options, asked.inputs, characters
    )
    async with service.running_until_stopped() as call:
        limit = service.time_limit(asked.timeout)
        given = {**options, **await _inputs(asked), "cancel": call.cancel, "timeout": limit}
        if asked.is_batch:
            many = engine.ascore_batch(continuations=texts, stops=asked.stops, **given)
            return tuple(await within(limit, many))
        one = engine.ascore(continuations=texts[0], stops=asked.stops, **given)
        return (await within(limit, one),)


def _limited(
    service: Service,
    engine: AdaFuseEngine,
    options: dict[str, Any],
    inputs: Sequence[wire.Input] = (),
    characters: int = 0,
) -> Any:
    """Return the options of a request within the limits of the server.

    Args:
        service: the service.
        engine: the engine of the request.
        options: the options.
        inputs: the inputs.
        characters: size of the texts that follow an input.

    Raises:
        ApiError: a limit is exceeded.
        InvalidOptionError: an option is unknown or out of range.
    """
    characters += max((each.characters for each in inputs), default=0)
    return service.check_limits(
        engine,
        options,
        inputs=max(len(inputs), 1),
        characters=characters,
        length_option="max_new_tokens",
    )


async def _work(service: Service, request: Request, work: Callable[[], T]) -> T:
    """Return the result of some work in a thread."""
    async with service.running_until_stopped():
        done = within(service.time_limit(), asyncio.to_thread(work))
        return await unless_disconnected(request.receive, done)


async def _stream(service: Service, request: Request) -> Response:
    """Start a stream. Its inputs are checked before the response begins."""
    lines = _lines(service, await _read(request, wire.StreamRequest))
    first = await unless_disconnected(request.receive, anext(lines))
    return StreamResponse(
        lines, first, media_type=JSON_LINES, send_timeout=service.config.send_timeout
    )


async def _cancel(service: Service, request: Request) -> Response:
    """End a stream. Nothing happens if it has ended."""
    asked = await _read(request, wire.CancelRequest)
    found = service.cancel_stream(asked.stream)
    if not found and service.cancel_elsewhere is not None:
        found = await service.cancel_elsewhere(asked.stream)
    return _written(wire.Cancelled(found=found))


async def _lines(service: Service, asked: wire.StreamRequest) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream.

    Before the first line, an error is raised. Then it is the last line.
    """
    stream = uuid.uuid4().hex
    begun = False

    async def start(cancel: threading.Event, timeout: float | None) -> Events:
        if asked.is_cancelled:
            cancel.set()
        service.streams[stream] = cancel
        return await _open(service, asked, cancel, timeout)

    try:
        async with service.decoding(start, timeout=asked.timeout) as events:
            begun = True
            engine = service.view(asked.strategy)
            size = len(asked.inputs) * engine.config.override(asked.options).n
            yield _line(wire.Head(stream=stream, size=size, members=engine.members))
            packed = wire.Events()
            async for index, event in events:
                yield _line(packed.pack(index, event))
    except Exception as error:
        if not begun:
            raise
        if not isinstance(error, (ApiError, AdaFuseError)):
            logger.exception("request %s failed", request_id())
        yield _line(wire.Line(failure=_failure(error)))
    finally:
        service.streams.pop(stream, None)


async def _open(
    service: Service, asked: wire.StreamRequest, cancel: threading.Event, timeout: float | None
) -> Events:
    """Check and encode the inputs of a stream."""
    engine = service.view(asked.strategy)
    options = await asyncio.to_thread(_limited, service, engine, asked.options, asked.inputs)
    await service.check_grammar(engine, options)
    given = {**options, **await _inputs(asked), "cancel": cancel, "timeout": timeout}
    return await (engine.open_stream_batch if asked.is_batch else engine.open_stream)(**given)


async def _inputs(asked: wire.StreamRequest | wire.ScoreRequest) -> dict[str, Any]:
    """Return the prompt or the messages of a request, or those of a batch.

    Raises:
        ApiError: a batch mixes prompts and conversations, or a request that is not a batch does not
            have one input.
        InvalidInputError: a conversation has an invalid form.
    """
    inputs = asked.inputs
    checked = await asyncio.to_thread(lambda: [each.conversation() for each in inputs])
    has_messages = any(each is not None for each in checked)
    if has_messages and not all(each is not None for each in checked):
        raise invalid("inputs must be prompts or conversations, not both", "inputs")
    given: list[Any] = [*checked] if has_messages else [each.prompt or "" for each in inputs]
    if asked.is_batch:
        return {"messages" if has_messages else "prompts": given}
    if len(given) != 1:
        raise invalid("a request that is not a batch has one input", "inputs")
    return {"messages" if has_messages else "prompt": given[0]}


def _line(form: BaseModel) -> bytes:
    return form.model_dump_json(exclude_defaults=True).encode() + b"\n"
