"""Replies that are to be objects of a class: asked for, read, asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import ChatMessage, CompletionResponse
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.program.utils import FlexibleModel, process_streaming_objects

from adafuse_llm import MalformedReplyError
from adafuse_llm.adapters.structured import (
    partial_json,
    correction,
    find_json,
    schema_instructions,
)

Model = TypeVar("Model", bound=BaseModel)


class Attempts(Generic[Model]):
    """Conversations to be answered until a reply is an object of a class.

        for messages in attempts:
            attempts.take(reply to messages)
        attempts.output

    A reply that is none is shown to the members with what is wrong with it, `retries` times at
    most; then the iterator raises.

    Raises:
        MalformedReplyError: no reply was of the form that was asked for.
    """

    output: Model

    def __init__(self, output_cls: type[Model], messages: list[ChatMessage], retries: int) -> None:
        self._output_cls = output_cls
        self._asked = _asking(output_cls, messages)
        self._left = retries + 1
        self._tries = retries + 1
        self._wrong = ""

    def __iter__(self) -> Iterator[list[ChatMessage]]:
        while not hasattr(self, "output"):
            if not self._left:
                raise MalformedReplyError(
                    f"no reply was a {self._output_cls.__name__} in {self._tries} attempts; "
                    f"the last one: {self._wrong}"
                )
            self._left -= 1
            yield self._asked

    def take(self, reply: str) -> None:
        """Read a reply; what is wrong with it goes into the next conversation."""
        try:
            self.output = self._output_cls.model_validate(find_json(reply))
        except (ValidationError, ValueError) as error:
            self._wrong = _short(error)
            self._asked = [
                *self._asked,
                ChatMessage(role="assistant", content=reply),
                ChatMessage(role="user", content=correction(self._wrong)),
            ]


class Partial(Generic[Model]):
    """What can be read of an object while its reply is written."""

    def __init__(self, output_cls: type[Model]) -> None:
        self._output_cls = output_cls
        self._read: Any = None

    def take(self, text: str) -> Model | FlexibleModel | None:
        """The object as far as `text` goes, where that is further than before."""
        begun = partial_json(text)
        if not begun:
            return None
        response = CompletionResponse(text=begun)
        before = None if self._read is None else [self._read]
        read: Any = process_streaming_objects(response, self._output_cls, before)
        if read == self._read:
            return None
        self._read = read
        return read  # type: ignore[no-any-return]


def _asking(output_cls: type[BaseModel], messages: list[ChatMessage]) -> list[ChatMessage]:
    """The conversation, with what is to be written at the end of the system message."""
    wanted = schema_instructions(output_cls.model_json_schema())
    if not messages or messages[0].role != "system":
        return [ChatMessage(role="system", content=wanted), *messages]
    system = f"{messages[0].content or ''}\n\n{wanted}".strip()
    return [ChatMessage(role="system", content=system), *messages[1:]]


def _short(error: Exception) -> str:
    """One line that says what is wrong."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = error.errors(include_url=False)
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'the object'}: {problem['msg']}"
        for problem in problems
    )
