"""The routes of OpenAI's API: chat completions, completions, responses, models."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adafuse_llm.config import CONSTRAINTS, AdaFuseConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import AdaFuseError, InvalidOptionError, MissingDependencyError
from adafuse_llm.results import Generation
from adafuse_llm.serving.access import request_id
from adafuse_llm.serving.errors import ApiError, invalid
from adafuse_llm.serving.http import (
    StreamResponse,
    read_object,
    unless_disconnected,
    unless_slow,
)
from adafuse_llm.serving.openai_completions import CompletionWriter, Writer, model_object
from adafuse_llm.serving.openai_fields import warnings_header
from adafuse_llm.serving.openai_requests import ServedRequest, read_chat, read_completion
from adafuse_llm.serving.openai_vocabulary import template_options, with_token_bias
from adafuse_llm.serving.responses_requests import read_response
from adafuse_llm.serving.responses_writer import ResponseWriter
from adafuse_llm.serving.service import SINGLE, Events, Service
from adafuse_llm.text.isolation import isolated

logger = logging.getLogger(__name__)

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


async def _models(service: Service, _: Request) -> Response:
    names = (service.config.served_model_name, *service.engine.members)
    return JSONResponse({"object": "list", "data": [_described(service, name) for name in names]})


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if name != service.config.served_model_name:
        service.check_model(name)
    return JSONResponse(_described(service, name))


def _described(service: Service, name: str) -> Any:
    engine = service.engine
    if name == service.config.served_model_name:
        window = engine.context_window
        return model_object(name, service.created, engine.members, engine.strategy.name, window)
    window = next(each.context_window for each in engine.member_info if each.name == name)
    return model_object(name, service.created, [name], SINGLE, window)


async def _complete(
    service: Service, read: Callable[..., ServedRequest], request: Request
) -> Response:
    """Answer a request for a chat completion, a completion or a response."""
    body = await read_object(request)
    reader = partial(read, strict=service.config.strict)
    asked = await unless_slow(len(await request.body()), reader, body)
    try:
        check = partial(_Call, service, asked)
        checked = service.checked(check, asked.options, forms=not asked.form.is_free)
        call = await unless_disconnected(request.receive, checked)
        headers = warnings_header(call.warnings)
        if not asked.stream:
            response = await unless_disconnected(request.receive, call.response())
            return JSONResponse(response, headers=headers)
        parts = call.parts()
        first = await unless_disconnected(request.receive, anext(parts))
    except (ApiError, AdaFuseError) as error:
        raise asked.error(error) from error
    limit = service.config.send_timeout
    return StreamResponse(parts, first, headers=headers, send_timeout=limit)


class _Call:
    """A request that was checked against the models, the limits and the grammars of the server.

    Args:
        service: the service.
        asked: the request.
        left: flag that is set when nobody waits for the request any more.

    Attributes:
        warnings: what the client should know about the request.

    Raises:
        ApiError: the request cannot be served.
        InvalidInputError: an option cannot be used.
    """

    def __init__(self, service: Service, asked: ServedRequest, left: threading.Event) -> None:
        engine, options = service.resolve(asked.model, asked.strategy, asked.options)
        options = template_options(engine, options, asked)
        options = with_token_bias(engine, options, asked)
        options = service.check_limits(
            engine,
            options,
            inputs=len(asked.prompts) or 1,
            characters=asked.characters,
            length_option=asked.given.get("max_new_tokens", "max_tokens"),
        )
        enforced, warnings = _constraint(engine, options, asked, left)
        self._service, self._asked, self._engine = service, asked, engine
        self._options = {**options, **enforced}
        self.warnings = [*asked.ignored.warnings, *warnings]
        self._writer = self._new_writer(asked.model or service.config.served_model_name)

    def _new_writer(self, model: str) -> Writer:
        config = self._engine.config.override(self._options)
        members = self._engine.members
        leader = None if config.counted_logprobs is None else config.leading_member(members)
        if self._asked.echoed is None:
            return CompletionWriter(model, self._asked, config.n, leader, self.warnings)

        def count_tokens(member: str, text: str) -> int:
            return len(self._engine.encode_text(text, use=(member,))[member])

        return ResponseWriter(
            model, self._asked, config, leader, warnings=self.warnings, count_tokens=count_tokens
        )

    async def response(self) -> dict[str, Any]:
        """Return the whole response."""
        done: dict[int, Generation] = {}
        async with self._service.decoding(self._start) as events:
            async for index, each in events:
                if each.generation is not None:
                    done[index] = each.generation
        return self._writer.response([done[index] for index in range(self._writer.size)])

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a streamed response.

        Until the first part, an error is raised. Then it is the last part.
        """
        begun = False
        try:
            async with aclosing(self._written()) as parts:
                async for part in parts:
                    begun = True
                    yield part
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, (ApiError, AdaFuseError)):
                logger.exception("request %s failed", request_id())
            yield self._writer.failure(self._asked.error(error))

    async def _written(self) -> AsyncGenerator[bytes, None]:
        done: dict[int, Generation] = {}
        async with self._service.decoding(self._start) as events:
            async for index, each in events:
                for part in self._writer.events(index, each):
                    yield part
                if each.generation is not None:
                    done[index] = each.generation
        for part in self._writer.ending([done[index] for index in sorted(done)]):
            yield part

    async def _start(self, cancel: threading.Event, timeout: float | None) -> Events:
        asked, given = self._asked, {"cancel": cancel, "timeout": timeout, **self._options}
        if asked.conversation is not None:
            return await self._engine.open_stream(messages=asked.conversation, **given)
        if len(asked.prompts) == 1:
            return await self._engine.open_stream(asked.prompts[0], **given)
        return await self._engine.open_stream_batch(asked.prompts, **given)


def _constraint(
    engine: AdaFuseEngine, options: dict[str, Any], asked: ServedRequest, left: threading.Event
) -> tuple[dict[str, Any], list[str]]:
    """Return the option that enforces the form of a reply, and a warning if nothing does.

    Raises:
        ApiError: the request wants the form to be enforced, and it cannot be.
    """
    config: AdaFuseConfig = engine.config.override(options)
    if any(getattr(config, name) is not None for name in CONSTRAINTS):
        engine.check_grammar(cancel=left, **options)
        return {}, []
    if asked.form.is_free or not asked.enforce:
        return {}, []
    try:
        with isolated(engine.runtime.grammar_isolation, left):
            constraint = asked.form.constraint()
        engine.check_grammar(cancel=left, **{**options, **constraint})
    except (InvalidOptionError, MissingDependencyError) as error:
        if asked.enforce is True:
            named = "response_format" if asked.echoed is None else "text.format"
            field = named if asked.form.schema is not None else "tools"
            raise invalid(str(error), field) from error
        return {}, [
            f"the form of the reply is only described to the members, not enforced: {error}"
        ]
    return constraint, []
