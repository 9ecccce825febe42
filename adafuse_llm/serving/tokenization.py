"""The route ``/tokenize``, in the form of vLLM, for each member's tokens."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adafuse_llm.serving.errors import invalid
from adafuse_llm.serving.http import read_object, unless_disconnected
from adafuse_llm.serving.openai_fields import Ignored, parse, warnings_header
from adafuse_llm.serving.openai_requests import Conversational, read_conversation
from adafuse_llm.serving.service import Service, smallest_window
from adafuse_llm.wire import EXTENSION


class _TokenizeBody(Conversational):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


def routes(service: Service) -> list[Route]:
    """Return the routes."""
    return [Route("/tokenize", partial(_tokenize, service), methods=["POST"])]


async def _tokenize(service: Service, request: Request) -> Response:
    """Return the tokens of a prompt, of a conversation, or of a text inside a prompt."""
    ignored = Ignored(strict=service.config.strict)
    asked = await read_object(request, partial(parse, _TokenizeBody), ignored)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("send either prompt or messages", "prompt")
    engine, options = service.resolve(asked.model, None, asked.options(ignored)[0])
    options.setdefault("chat_template_kwargs", asked.chat_template_kwargs)

    def encode(_: threading.Event) -> dict[str, list[int]]:
        text, conversation = asked.prompt or "", None
        if asked.messages is not None:
            conversation = read_conversation(asked, asked.messages, ignored)
        characters = len(text) if conversation is None else conversation.characters
        service.check_limits(engine, options, characters=characters)
        if conversation is not None:
            return engine.encode_prompt(messages=conversation, **options)
        if not asked.add_special_tokens:
            return engine.encode_text(text, **options)
        return engine.encode_prompt(text, **options)

    tokens = await unless_disconnected(request.receive, service.result(encode))
    member = max(tokens, key=lambda name: len(tokens[name]))
    extension: dict[str, Any] = {"member": member, "tokens": tokens}
    if ignored.warnings:
        extension["warnings"] = ignored.warnings
    answer: dict[str, Any] = {
        "count": len(tokens[member]),
        "max_model_len": smallest_window(engine, tokens),
        "tokens": tokens[member],
        EXTENSION: extension,
    }
    return JSONResponse(answer, headers=warnings_header(ignored.warnings))
