"""The routes ``/tokenize`` and ``/detokenize``, in the form of vLLM, for each member's tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adafuse_llm.backends import RestrictsTokens
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import AdaFuseError, short_list
from adafuse_llm.serving.errors import api_error, invalid
from adafuse_llm.serving.http import read_object, unless_disconnected
from adafuse_llm.serving.openai_fields import Ignored, parse, warnings_header
from adafuse_llm.serving.openai_requests import (
    Body,
    Extended,
    Extension,
    read_conversation,
    read_options,
)
from adafuse_llm.serving.service import Service
from adafuse_llm.text.words import is_incomplete
from adafuse_llm.wire import EXTENSION

T = TypeVar("T")

MAX_TOKEN = 2**31
"""Token ids are below this number if the size of the vocabulary is not known."""

MAX_PIECE = 16
"""Number of tokens after which a character counts as broken. A whole one has up to four."""


class _TokenizeBody(Extended):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class _DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int] = Field(min_length=1)


def routes(service: Service) -> list[Route]:
    """Return the routes."""
    return [
        Route("/tokenize", partial(_tokenize, service), methods=["POST"]),
        Route("/detokenize", partial(_detokenize, service), methods=["POST"]),
    ]


async def _tokenize(service: Service, request: Request) -> Response:
    """Return the tokens of a prompt, of a conversation, or of a text inside a prompt."""
    ignored = Ignored(strict=service.config.strict)
    asked = await read_object(request, partial(parse, _TokenizeBody, ignored=ignored))
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("send either prompt or messages", "prompt")
    if asked.messages is not None and asked.add_generation_prompt is False:
        raise invalid(
            "add_generation_prompt: false is not supported: the tokens of messages are those of a "
            "prompt, up to the beginning of the reply",
            "add_generation_prompt",
        )
    engine, options = service.resolve(asked.model, None, read_options(asked)[0])
    options.setdefault("chat_template_kwargs", asked.chat_template_kwargs)
    instructions = (asked.adafuse or Extension()).instructions

    def encode() -> dict[str, list[int]]:
        text, conversation = asked.prompt or "", None
        if asked.messages is not None:
            conversation = read_conversation(
                asked.messages, asked.tools or (), asked.tool_choice, instructions, ignored
            )
        characters = len(text) if conversation is None else conversation.characters
        service.check_limits(engine, options, characters=characters)
        if conversation is not None:
            return engine.encode_prompt(messages=conversation, **options)
        if asked.add_special_tokens is False:
            return engine.encode_text(text, **options)
        return engine.encode_prompt(text, **options)

    def work() -> tuple[dict[str, list[int]], str, list[str]]:
        tokens = encode()
        member = max(tokens, key=lambda name: len(tokens[name]))
        texts = _texts(engine, member, tokens[member]) if asked.return_token_strs else []
        return tokens, member, texts

    tokens, member, texts = await _work(service, request, work)
    windows = [each.context_window for each in engine.member_info if each.name in tokens]
    extension: dict[str, Any] = {"member": member, "tokens": tokens}
    if ignored.warnings:
        extension["warnings"] = ignored.warnings
    answer: dict[str, Any] = {
        "count": len(tokens[member]),
        "max_model_len": min((each for each in windows if each is not None), default=None),
        "tokens": tokens[member],
        EXTENSION: extension,
    }
    if asked.return_token_strs:
        answer["token_strs"] = texts
    return JSONResponse(answer, headers=warnings_header(ignored.warnings))


async def _detokenize(service: Service, request: Request) -> Response:
    """Return the text of some tokens of one member."""
    ignored = Ignored(strict=service.config.strict)
    asked = await read_object(request, partial(parse, _DetokenizeBody, ignored=ignored))
    engine, options = service.resolve(asked.model, None, {})
    members = options.get("use") or engine.members
    if len(members) != 1:
        raise invalid(
            "token ids differ between members, so model must be the name of one of them: "
            f"{short_list(engine.members)}",
            "model",
        )
    text = await _work(service, request, partial(_decode, engine, members[0], asked.tokens))
    return JSONResponse({"prompt": text}, headers=warnings_header(ignored.warnings))


def _decode(engine: AdaFuseEngine, member: str, tokens: list[int]) -> str:
    backend = next(each for each in engine.backends if each.name == member)
    texts = backend.token_texts if isinstance(backend, RestrictsTokens) else None
    size = MAX_TOKEN if texts is None else len(texts)
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise invalid(
            f"the member {member!r} has no token {wrong[0]}; its ids are from 0 to {size - 1}",
            "tokens",
        )
    return backend.codec.decode_continuation((), tokens)


def _texts(engine: AdaFuseEngine, member: str, tokens: list[int]) -> list[str]:
    """Return what each token adds to the text of the tokens before it.

    Only the tokens of the last character are decoded again, so that long texts of characters of
    several tokens cost no more for each token.
    """
    codec = next(each.codec for each in engine.backends if each.name == member)
    inside, _ = codec.encode_continuation((), "a")  # stands for the text before a token
    before: list[int] = []
    piece: list[int] = []
    texts = []
    for token in tokens:
        texts.append(codec.decode_continuation([*before, *piece], [token]))
        piece.append(token)
        is_whole = not is_incomplete(codec.decode_continuation(before, piece))
        if is_whole or len(piece) == MAX_PIECE:
            before, piece = inside, []
    return texts


async def _work(service: Service, request: Request, work: Callable[[], T]) -> T:
    """Return the result of some work in a thread, within the time limit of the server.

    Raises:
        ApiError: the work failed.
    """
    try:
        return await unless_disconnected(request.receive, service.result(lambda _: work()))
    except AdaFuseError as error:
        raise api_error(error) from error
