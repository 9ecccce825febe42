"""Structured output: request replies that are objects of a class, parse them, and retry."""

from __future__ import annotations

from collections.abc import Iterator
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
from llama_index.llms.adafuse._messages import Correction, Instructions

from adafuse_llm import MalformedReplyError
from adafuse_llm.adapters.structured import (
    correction,
    find_json,
    partial_json,
    schema_instructions,
)

Model = TypeVar("Model", bound=BaseModel)


class Attempts(Generic[Model]):
    """An iterator over conversations that request an object of a class. It ends at a valid reply.

        for messages in attempts:
            attempts.take(reply to messages)
        attempts.output

    After an invalid reply, the next conversation contains that reply and its errors. There are at
    most `retries` such conversations.

    Raises:
        MalformedReplyError: no reply is a valid object. The iterator raises this error.
    """

    output: Model

    def __init__(self, output_cls: type[Model], messages: list[ChatMessage], retries: int) -> None:
        self._output_cls = output_cls
        instructions = schema_instructions(output_cls.model_json_schema())
        self._messages: list[ChatMessage] = [
            Instructions(role=MessageRole.SYSTEM, blocks=[TextBlock(text=instructions)]),
            *messages,
        ]
        self._attempts = 0
        self._max_attempts = retries + 1
        self._last_error = ""

    def __iter__(self) -> Iterator[list[ChatMessage]]:
        while not hasattr(self, "output"):
            if self._attempts >= self._max_attempts:
                raise MalformedReplyError(
                    f"no reply was a valid {self._output_cls.__name__} in {self._attempts} "
                    f"attempts; the last error: {self._last_error}"
                )
            self._attempts += 1
            yield self._messages

    def take(self, response: ChatResponse) -> None:
        """Parse a reply; if it is invalid, add it and its errors to the next conversation."""
        reply, closing = response.message.content or "", closing_of(response)
        is_cut = getattr(response.raw, "finish_reason", None) == "length"
        try:
            value = find_json(reply, closing=closing, is_cut=is_cut)
            self.output = self._output_cls.model_validate(value)
        except (ValidationError, ValueError) as error:
            self._last_error = _summarize(error)
            if closing:  # the next reply would be as long
                self._max_attempts = 0
            self._messages = [
                *self._messages,
                ChatMessage(role="assistant", content=reply),
                Correction(
                    role=MessageRole.USER, blocks=[TextBlock(text=correction(self._last_error))]
                ),
            ]


class Partial(Generic[Model]):
    """A parser of unfinished replies."""

    def __init__(self, output_cls: type[Model]) -> None:
        self._output_cls = output_cls
        self._previous: Any = None

    def take(self, response: ChatResponse) -> Model | FlexibleModel | None:
        """Return the partial object in a reply, or None if it is absent or has not changed."""
        text = response.message.content or ""
        partial = partial_json(text.removesuffix(closing_of(response)))
        if not partial:
            return None
        parsed = CompletionResponse(text=partial)
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
