"""The rounds behind an answer, in the answer: ``response.metadata["adafuse"]``."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.llms.adafuse.raw import AdaFuseRaw
from llama_index_instrumentation import get_dispatcher
from typing_extensions import Self

from adafuse_llm import Generation

KEY = "adafuse"
_WHOLE = (Response, PydanticResponse, AgentChatResponse)

_READERS: ContextVar[tuple[list[AdaFuseRaw], ...]] = ContextVar("adafuse_readers", default=())
"""Lists of the streamed responses that are being read."""


class DecisionSpan(BaseSpan):
    """A span, with what was decided in it and in the spans within it."""

    made: list[AdaFuseRaw] = Field(default_factory=list)
    outer: list[list[AdaFuseRaw]] = Field(default_factory=list)


class DecisionHandler(BaseSpanHandler[DecisionSpan]):
    """Puts the rounds behind it into the responses of query engines, streaming or not, and of chat
    engines that do not stream.

    For example::

        with DecisionHandler():
            response = query_engine.query("Who founded the mill?")
        response.metadata["adafuse"][-1].summary

    The value is a list of `AdaFuseRaw`, one for each answer of the members, in the order in which
    they ended; that of a response that streams grows until its text is read. Responses of other
    tasks and threads are told apart. It stays attached between `attach` and `detach`, or in a
    ``with`` block. LLMs with ``emit_events=False`` tell it nothing.
    """

    def attach(self) -> Self:
        """Listen to everything that LlamaIndex does in this process."""
        get_dispatcher().add_span_handler(self)
        return self

    def detach(self) -> None:
        """Stop listening."""
        root = get_dispatcher()
        root.span_handlers = [each for each in root.span_handlers if each is not self]

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

    @classmethod
    def class_name(cls) -> str:
        return "DecisionHandler"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> DecisionSpan:
        parent = self.open_spans.get(parent_span_id or "")
        outer = [parent.made, *parent.outer] if parent else [*_READERS.get()]
        span = DecisionSpan(id_=id_, parent_id=parent_span_id)
        span.outer = outer  # not through the constructor, which would copy the lists
        return span

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> DecisionSpan | None:
        span = self.open_spans.get(id_)
        if span is None:
            return None
        if isinstance(result, Generation):
            raw = AdaFuseRaw.of_response(result)
            for made in span.outer:
                made.append(raw)
        elif isinstance(result, (*_WHOLE, StreamingResponse, AsyncStreamingResponse)):
            result.metadata = {**(result.metadata or {}), KEY: span.made}
            if isinstance(result, StreamingResponse):
                result.response_gen = _read(result.response_gen, span.made)
            elif isinstance(result, AsyncStreamingResponse):
                result.response_gen = _aread(result.response_gen, span.made)
        return span

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> DecisionSpan | None:
        return self.open_spans.get(id_)


# Core asks the LLM of a streamed response when its text is read, with no span open any more.


@contextmanager
def _reading(made: list[AdaFuseRaw]) -> Iterator[None]:
    """What is decided meanwhile, in this context, goes into `made`."""
    token = _READERS.set((*_READERS.get(), made))
    try:
        yield
    finally:
        _READERS.reset(token)


def _read(tokens: Iterator[str], made: list[AdaFuseRaw]) -> Generator[str, None, None]:
    while True:
        with _reading(made):
            token = next(tokens, None)
        if token is None:
            return
        yield token


async def _aread(tokens: AsyncIterator[str], made: list[AdaFuseRaw]) -> AsyncGenerator[str, None]:
    while True:
        with _reading(made):
            token = await anext(tokens, None)
        if token is None:
            return
        yield token
