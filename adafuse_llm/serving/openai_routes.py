"""The routes of OpenAI's API: chat completions, completions, responses, models."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adafuse_llm.adapters.enforcing import enforced
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import (
    AdaFuseError,
    CacheMemoryError,
    InvalidOptionError,
    MissingDependencyError,
)
from adafuse_llm.request import Request as EngineRequest
from adafuse_llm.results import Generation, Scores
from adafuse_llm.run import Run
from adafuse_llm.serving.access import request_id
from adafuse_llm.serving.errors import ApiError, invalid
from adafuse_llm.serving.http import (
    COMMENT,
    StreamResponse,
    read_object,
    unless_disconnected,
    with_pauses,
)
from adafuse_llm.serving.openai_completions import CompletionWriter, model_object
from adafuse_llm.serving.openai_fields import Ignored, warnings_header
from adafuse_llm.serving.openai_requests import ServedRequest, read_chat, read_completion
from adafuse_llm.serving.openai_vocabulary import check_prompts, with_variables
from adafuse_llm.serving.responses_requests import read_response
from adafuse_llm.serving.responses_writer import ResponseWriter
from adafuse_llm.serving.service import SINGLE, Service, smallest_window

logger = logging.getLogger(__name__)

Writer = CompletionWriter | ResponseWriter
Opened = AbstractAsyncContextManager[tuple[Run[Any], Writer]]
"""A request that is opened when the context is entered."""

DEFAULT_LIMIT = AdaFuseConfig().max_new_tokens
"""The limit of tokens if nobody sets another. It is too low for most calls of tools."""

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def routes(service: Service) -> list[Route]:
    """Return the routes of OpenAI's API."""
    return [
        Route(CHAT, partial(_complete, service, read_chat), methods=["POST"]),
        Route(COMPLETION, partial(_complete, service, read_completion), methods=["POST"]),
        Route(RESPONSE, partial(_complete, service, read_response), methods=["POST"]),
        Route("/v1/models", partial(_models, service), methods=["GET"]),
        Route("/v1/models/{name:path}", partial(_model, service), methods=["GET"]),
    ]


async def _models(service: Service, request: Request) -> Response:
    """Return the models: the ensemble, with the strategy that the query names, and the members."""
    names = (service.config.served_model_name, *service.engine.members)
    engine = service.view(request.query_params.get("strategy"))
    return JSONResponse({"object": "list", "data": [_described(service, engine, n) for n in names]})


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if name != service.config.served_model_name:
        service.check_model(name)
    return JSONResponse(_described(service, service.engine, name))


def _described(service: Service, engine: AdaFuseEngine, name: str) -> Any:
    if name == service.config.served_model_name:
        return model_object(
            name,
            service.created,
            engine.members,
            engine.strategy.name,
            engine.context_window,
            member_info=[each.model_dump() for each in engine.member_info],
            config=engine.config.override(service.check_limits(engine, {})).model_dump(
                mode="json", exclude_defaults=True
            ),
            can_enforce=engine.can_enforce,
        )
    return model_object(name, service.created, [name], SINGLE, smallest_window(engine, [name]))


async def _complete(
    service: Service, read: Callable[..., ServedRequest], request: Request
) -> Response:
    """Answer a request for a chat completion, a completion or a response."""
    asked = await read_object(request, read, Ignored(strict=service.config.strict))
    opened = service.admitted(
        partial(_open, service, asked),
        has_grammar=asked.has_grammar,
        limit=service.time_limit(asked.timeout),
    )
    try:
        if asked.check:
            work = service.result(partial(_check, service, asked), has_grammar=True)
            await unless_disconnected(request.receive, work)
            return JSONResponse({"object": "check", "choices": []})
        if not asked.stream or asked.texts is not None:
            return await unless_disconnected(request.receive, _whole(service, asked, opened))
        parts = _parts(service, asked, opened)
        first = await unless_disconnected(request.receive, anext(parts))
    except (ApiError, AdaFuseError) as error:
        raise asked.error(error) from error
    return StreamResponse(parts, first, headers=warnings_header(asked.ignored.warnings))


def _check(service: Service, asked: ServedRequest, _: threading.Event) -> None:
    """Check that the members can follow the grammar of a request."""
    engine, options = service.resolve(asked.model, asked.strategy, asked.options)
    engine.check_grammar(**service.check_limits(engine, options))


def _open(
    service: Service, asked: ServedRequest, cancel: threading.Event
) -> tuple[Run[Any], Writer]:
    """Check a request against the models, the limits and the grammars of the server, and open it.

    Raises:
        ApiError: the request cannot be served.
        InvalidInputError: an option cannot be used.
    """
    engine, options = service.resolve(asked.model, asked.strategy, asked.options)
    if asked.variables or asked.effort is not None:
        options = with_variables(engine, options, asked)
    check_prompts(engine, options, asked)
    chat, inputs = asked.conversation, len(asked.prompts) or 1
    has_limit = "max_new_tokens" in options or engine.config.max_new_tokens != DEFAULT_LIMIT
    open_ended = asked.open_ended or (asked.form.calls_tools and not has_limit)
    options = service.check_limits(
        engine,
        options,
        inputs=inputs,
        characters=sum(map(len, asked.texts or ()))
        + (max(map(len, asked.prompts)) if chat is None else chat.characters),
        length_option=asked.length_field,
        open_ended=open_ended,
    )
    try:
        options, problem = enforced(engine, asked.form, options, asked.enforce)
    except (InvalidOptionError, MissingDependencyError) as error:
        named = "response_format" if asked.echoed is None else "text.format"
        raise invalid(str(error), named if asked.form.schema is not None else "tools") from error
    if problem:
        asked.ignored.warnings.append(
            f"the form of the reply is only described to the members, not enforced: {problem}"
        )
    request = EngineRequest(
        messages=chat,
        options=options,
        texts=asked.texts,
        ends=asked.ends,
        timeout=service.time_limit(asked.timeout),
        cancel=cancel,
    )
    requests = [request] if chat else [replace(request, prompt=each) for each in asked.prompts]
    run = _opened(engine, requests, open_ended=open_ended)
    config = engine.config.override(options)
    model = asked.model or service.config.served_model_name
    leader = None if config.counted_logprobs is None else config.reported_member(engine.members)
    if asked.echoed is None or asked.texts is not None:
        return run, CompletionWriter(model, asked, run.size // inputs, leader)

    def count_tokens(member: str, text: str) -> int:
        return len(engine.encode_text(text, use=(member,))[member])

    return run, ResponseWriter(model, asked, config, leader, count_tokens)


def _opened(engine: AdaFuseEngine, requests: list[EngineRequest], *, open_ended: bool) -> Run[Any]:
    """Open requests. Without a limit of their own, they ask for as many tokens as memory allows."""
    while True:
        try:
            return engine.open(requests)
        except CacheMemoryError:
            limit = requests[0].options.get("max_new_tokens", 0) // 2
            if not open_ended or limit < engine.config.max_new_tokens:
                raise
            options = {**requests[0].options, "max_new_tokens": limit}
            requests = [replace(each, options=options) for each in requests]


async def _whole(service: Service, asked: ServedRequest, opened: Opened) -> Response:
    """Return the whole response to a request."""
    async with opened as (run, writer):
        done = {
            index: result
            async for index, each in service.events(run)
            if (result := each if isinstance(each, Scores) else each.generation) is not None
        }
    results: list[Any] = [done[index] for index in range(run.size)]
    if isinstance(writer, CompletionWriter) and asked.texts is not None:
        response = writer.scored(results)
    else:
        response = writer.response(results)
    return JSONResponse(response, headers=warnings_header(asked.ignored.warnings))


async def _parts(
    service: Service, asked: ServedRequest, opened: Opened
) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a streamed response.

    Until the first part, an error is raised. Then it is the last part.
    """
    writer: Writer | None = None
    done: dict[int, Generation] = {}
    try:
        async with opened as (run, begun), aclosing(with_pauses(service.events(run))) as events:
            async for numbered in events:
                writer = begun
                if numbered is None:
                    yield COMMENT
                    continue
                index, each = numbered
                for part in writer.events(index, each):
                    yield part
                if each.generation is not None:
                    done[index] = each.generation
        for part in begun.ending([done[index] for index in sorted(done)]):
            yield part
    except Exception as error:
        if writer is None:
            raise
        if not isinstance(error, (ApiError, AdaFuseError)):
            logger.exception("request %s failed", request_id())
        yield writer.failure(asked.error(error))
