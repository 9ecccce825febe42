"""The ASGI application: its routes and their answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adafuse_llm import errors
from adafuse_llm.adapters.reply_form import enforced
from adafuse_llm.config import GRAMMARS
from adafuse_llm.encoding import spelled_token
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import AdaFuseError
from adafuse_llm.remote.wire import EXTENSION
from adafuse_llm.request import Request as EngineRequest
from adafuse_llm.results import Generation, Scores, smallest_window
from adafuse_llm.run import Run
from adafuse_llm.serving import bodies, sse
from adafuse_llm.serving.access import CURRENT_REQUEST, middlewares, outcome_of
from adafuse_llm.serving.completions import CompletionWriter
from adafuse_llm.serving.decisions import answer_questions
from adafuse_llm.serving.errors import ApiError, api_error, invalid
from adafuse_llm.serving.page import page_route
from adafuse_llm.serving.responses import ResponseWriter, read_response
from adafuse_llm.serving.service import SINGLE, Service
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.text.reply_start import EFFORT, effort_variables

logger = logging.getLogger(__name__)

Writer = CompletionWriter | ResponseWriter
Opened = AbstractAsyncContextManager[tuple[Run[Any], Writer]]
"""A context manager that opens a request, and yields its run and the writer of its responses."""


def build_app(service: Service, api_keys: Sequence[str] = ()) -> Starlette:
    """Return the application of a service. The service can get its engine later.

    With `api_keys`, requests need one of them, except those to ``/``, ``/health`` and ``/ready``.
    """
    posts = {
        "/v1/chat/completions": partial(_complete, service, bodies.read_chat),
        "/v1/completions": partial(_complete, service, bodies.read_completion),
        "/v1/responses": partial(_complete, service, read_response),
        **dict.fromkeys(("/v1/decisions", "/v1/systemone"), partial(answer_questions, service)),
        "/tokenize": partial(_tokenize, service),
    }
    gets = dict.fromkeys(("/v1/models", "/v1/models/{name:path}"), partial(_models, service))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        if service.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503)

    async def metrics(_: Request) -> Response:
        body, kind = service.metrics.exposition()
        return Response(body, media_type=kind)

    app = Starlette(
        middleware=middlewares(
            service.config, api_keys, count=service.metrics.request, counted=posts
        ),
        routes=[
            Route("/health", health, methods=["GET"]),
            Route("/ready", ready, methods=["GET"]),
            *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
            *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
            Route("/metrics", metrics),
            *([page_route()] if service.config.page else []),
        ],
        exception_handlers=dict.fromkeys(
            (ApiError, AdaFuseError, HTTPException, ClientDisconnect),
            partial(_failed, [*posts, "/v1/models"]),
        ),
    )
    app.state.service = service
    return app


async def _models(service: Service, request: Request) -> Response:
    engine = service.view(request.query_params.get("strategy"))
    own = service.config.served_model_name

    def described(name: str) -> dict[str, Any]:
        extension: dict[str, Any] = {"members": [name], "strategy": SINGLE}
        if name == own:
            config = engine.config.override(service.check_limits(engine, {}))
            extension = {
                "members": list(engine.members),
                "strategy": engine.strategy.name,
                "member_info": [member.model_dump() for member in engine.member_info],
                "config": config.model_dump(mode="json", exclude_defaults=True),
                "can_enforce": engine.can_enforce,
            }
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "adafuse-llm",
            "max_model_len": smallest_window(engine.member_info, extension["members"]),
            EXTENSION: extension,
        }

    if (name := request.path_params.get("name")) is not None:
        service.check_model(name)
        return JSONResponse(described(name))
    models = [described(name) for name in (own, *engine.members)]
    return JSONResponse({"object": "list", "data": models})


async def _complete(
    service: Service, read: Callable[..., bodies.ServedRequest], request: Request
) -> Response:
    asked = await sse.read_object(request, read, service.config)
    extension, limit = asked.body.adafuse, service.config.request_timeout
    if extension.timeout is not None:
        limit = min(extension.timeout, limit or extension.timeout)
    try:
        if extension.check:
            work = service.result(partial(_check, service, asked), has_grammar=True)
            await sse.unless_disconnected(request.receive, work)
            return JSONResponse({"object": "check", "choices": []})
        forms = (*map(asked.options.get, GRAMMARS), asked.form.schema)
        opened = service.admitted(
            partial(_open, service, asked, limit),
            has_grammar=asked.form.calls_tools or any(form is not None for form in forms),
            limit=limit,
        )
        if not asked.body.stream or extension.texts is not None:
            return await sse.unless_disconnected(request.receive, _whole(service, opened))
        parts = _parts(service, asked, opened)
        first = await sse.unless_disconnected(request.receive, anext(parts))
    except (ApiError, AdaFuseError) as error:
        raise asked.error(error) from error
    return sse.StreamResponse(first, parts)


def _check(service: Service, asked: bodies.ServedRequest, _: threading.Event) -> None:
    engine, options = service.resolve(asked.body.model, asked.body.adafuse.strategy, asked.options)
    engine.check_grammar(**service.check_limits(engine, options))


def _open(
    service: Service, asked: bodies.ServedRequest, timeout: float | None, cancel: threading.Event
) -> tuple[Run[Any], Writer]:
    """Check a request, and open it. Return its run and the writer of its responses."""
    body, extension, inputs = asked.body, asked.body.adafuse, len(asked.prompts) or 1
    engine, options = service.resolve(body.model, extension.strategy, asked.options)
    # check what depends on the members: variables of templates, and control tokens in prompts
    if asked.variables or asked.effort or asked.prompts:
        active = engine.config.override(options).use or engine.members
        decoding = [backend for backend in engine.backends if backend.name in active]
        codecs = {backend.name: backend.codec for backend in decoding}
        options = _with_variables(engine, options, asked, codecs)
        spelled = (spelled_token(name, codecs[name], p) for name in codecs for p in asked.prompts)
        asked.ignored.warnings += [warning for warning in spelled if warning][:1]
    # check the server's limits; replies to chats are long by default, except for a RemoteEngine
    form, conversation = asked.form, asked.conversation
    is_long = conversation is not None and not extension.as_engine
    sizes = map(len, asked.prompts) if conversation is None else [conversation.characters]
    options = service.check_limits(
        engine,
        options,
        inputs=inputs,
        characters=max(sizes) + sum(map(len, extension.texts or ())),
        is_long=is_long or form.calls_tools or form.schema is not None,
    )
    # enforce the form of the reply by a grammar, if the members can follow one
    if form.tools or form.schema is not None:
        try:
            options, warning = enforced(engine, form, options, asked.enforce)
        except (errors.InvalidOptionError, errors.MissingDependencyError) as error:
            raise invalid(str(error), "tools" if form.schema is None else body.FORM) from error
        if warning:
            asked.ignored.warnings.append(warning)
    asked.options = options if asked.enforce else {}  # a client's own grammar is none of calls
    request = EngineRequest(
        messages=conversation,
        options=options,
        texts=extension.texts,
        ends=extension.ends,
        timeout=timeout,
        cancel=cancel,
        is_long=is_long,
    )
    requests = [replace(request, prompt=prompt) for prompt in asked.prompts] or [request]
    run = engine.open(requests)
    config = engine.config.override(options)
    model = body.model or service.config.served_model_name
    has_logprobs = config.counted_logprobs is not None
    if asked.echoed is None or extension.texts is not None:
        return run, CompletionWriter(model, asked, run.size // inputs, has_logprobs)
    return run, ResponseWriter(model, asked, engine, config, has_logprobs)


def _with_variables(
    engine: AdaFuseEngine,
    options: dict[str, Any],
    asked: bodies.ServedRequest,
    codecs: Mapping[str, TextCodec],
) -> dict[str, Any]:
    """Return the options with those variables that a chat template reads. Warn about the others.

    Clients send ``reasoning_effort`` unasked, so if a template refuses it, there is only a warning.
    """
    known = {name for codec in codecs.values() for name in codec.template_facts.variables}
    variables = dict(asked.variables)
    if asked.effort is not None:
        read, problem = effort_variables(codecs, asked.effort)
        variables = {**read, **variables}
        if problem:
            asked.ignored.add(EFFORT, problem)
    for name in [name for name in variables if name not in known and name not in engine.members]:
        asked.ignored.add(name, "no chat template of the members reads it")
        del variables[name]
    variables |= options.get("chat_template_kwargs") or {}
    return {**options, "chat_template_kwargs": variables} if variables else options


async def _whole(service: Service, opened: Opened) -> Response:
    async with opened as (run, writer):
        done: dict[int, Any] = {
            index: result
            async for index, event in service.events(run)
            if (result := event if isinstance(event, Scores) else event.generation) is not None
        }
    results = [done[index] for index in range(run.size)]
    # in a thread: counting the tokens of the reasoning would hold up other requests
    return JSONResponse(await anyio.to_thread.run_sync(writer.response, results))


async def _parts(
    service: Service, asked: bodies.ServedRequest, opened: Opened
) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a stream. Errors before the first part are raised; later ones are sent."""
    writer: Writer | None = None
    done: dict[int, Generation] = {}
    try:
        async with opened as (run, begun), aclosing(sse.with_pauses(service.events(run))) as events:
            async for numbered in events:
                writer = begun
                if numbered is None:
                    yield sse.COMMENT
                    continue
                index, event = numbered
                for part in writer.events(index, event):
                    yield part
                if event.generation is not None:
                    done[index] = event.generation
        results = [done[index] for index in sorted(done)]
        for part in await anyio.to_thread.run_sync(lambda: [*begun.ending(results)]):
            yield part
    except Exception as error:
        if writer is None:
            raise
        call, described = CURRENT_REQUEST.get(), asked.error(error)
        if not isinstance(error, (ApiError, AdaFuseError)):
            logger.exception("request %s failed", call.id)
        call.outcome = outcome_of(described.status)
        yield writer.failure(described)


async def _tokenize(service: Service, request: Request) -> Response:
    asked = await sse.read_object(request, bodies.read_tokenize, service.config)
    body, conversation = asked.body, asked.conversation

    def encode(_: threading.Event) -> tuple[dict[str, list[int]], int | None]:
        engine, options = service.resolve(body.model, None, asked.options)
        options.setdefault("chat_template_kwargs", asked.variables)
        if isinstance(body, bodies.TokenizeBody):
            service.check_limits(engine, options, characters=len(body.prompt))
            encode = engine.encode_prompt if body.add_special_tokens else engine.encode_text
            tokens = encode(body.prompt, **options)
        else:
            assert conversation is not None
            service.check_limits(engine, options, characters=conversation.characters)
            tokens = engine.encode_prompt(messages=conversation, **options)
        return tokens, smallest_window(engine.member_info, tokens)

    tokens, window = await sse.unless_disconnected(request.receive, service.result(encode))
    member = max(tokens, key=lambda name: len(tokens[name]))
    extension: dict[str, Any] = {"member": member, "tokens": tokens}
    if asked.ignored.warnings:
        extension["warnings"] = asked.ignored.warnings
    return JSONResponse(
        {
            "count": len(tokens[member]),
            "max_model_len": window,
            "tokens": tokens[member],
            EXTENSION: extension,
        }
    )


async def _failed(paths: Sequence[str], request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # for the log only, because the client has left
    if not isinstance(error, HTTPException):
        return api_error(error).response()
    path, code = request.url.path[:200], "not_found"
    message = (
        f"there is no address {path!r} here. The server has {', '.join(paths)}. OpenAI's clients "
        "need a base address that ends in /v1. If a proxy adds a path, set -o root_path=/PATH."
    )
    if error.status_code == 405:
        message, code = f"{path} does not take the method {request.method}", "method_not_allowed"
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()
