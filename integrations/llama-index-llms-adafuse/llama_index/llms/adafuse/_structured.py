"""Structured output: request replies that are objects of a class, and parse them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.program.utils import FlexibleModel, process_streaming_objects
from llama_index.llms.adafuse._messages import Instructions

from adafuse_llm import MalformedReplyError
from adafuse_llm.adapters.reply_form import ReplyForm

Model = TypeVar("Model", bound=BaseModel)


def asking(output_cls: type[BaseModel], messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a conversation that requests an object of a class."""
    instructions = ReplyForm(schema=output_cls.model_json_schema()).instructions
    first = Instructions(role=MessageRole.SYSTEM, blocks=[TextBlock(text=instructions)])
    return [first, *messages]


def parsed(output_cls: type[Model], response: ChatResponse) -> Model:
    """Return the object in a reply, ignoring code fences and text around it.

    Raises:
        MalformedReplyError: the reply is no valid object.
    """
    try:
        return output_cls.model_validate(_value(response))
    except (ValidationError, ValueError, RecursionError) as error:
        raise MalformedReplyError(
            f"the reply is no valid {output_cls.__name__}: {_summarize(error)}"
        ) from error


def _value(response: ChatResponse) -> Any:
    """Return the JSON of a reply, or the first object in it."""
    text, closing = response.message.content or "", closing_of(response)
    is_cut = getattr(response.raw, "finish_reason", None) == "length"
    problem = "it has no JSON"
    try:
        with suppress(ValueError):
            return json.loads(text.removesuffix(closing))
        value, end = json.JSONDecoder().raw_decode(text, max(text.find("{"), 0))
        if not closing and not (is_cut and "{" in text[end:]):  # else a draft of what is cut
            return value
    except ValueError as error:
        problem = str(error)
    raise ValueError(f"{problem}{'; max_tokens or the context window cut it off' * is_cut}")


class Partial(Generic[Model]):
    """A parser of unfinished replies."""

    def __init__(self, output_cls: type[Model]) -> None:
        self._output_cls = output_cls
        self._previous: Any = None

    def take(self, response: ChatResponse) -> Model | FlexibleModel | None:
        """Return the partial object in a reply, or None if it is absent or has not changed."""
        text = response.message.content or ""
        _, brace, partial = text.removesuffix(closing_of(response)).partition("{")
        if not brace:
            return None
        parsed = CompletionResponse(text=f"{brace}{partial}")
        previous = None if self._previous is None else [self._previous]
        current: Any = process_streaming_objects(parsed, self._output_cls, previous)
        if current == self._previous:
            return None
        self._previous = current
        return current  # type: ignore[no-any-return]


def closing_of(response: ChatResponse) -> str:
    """Return the end of a reply that the engine made up."""
    return getattr(response.raw, "closing", "")


def _summarize(error: Exception) -> str:
    """Return the errors as one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = error.errors(include_url=False)
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'the object'}: {problem['msg']}"
        for problem in problems
    )
