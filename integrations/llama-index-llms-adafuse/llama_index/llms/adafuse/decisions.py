"""A handler that adds the rounds of a response to ``response.metadata["adafuse"]``."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
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
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.llms.adafuse.raw import AdaFuseRaw
from llama_index_instrumentation import get_dispatcher
from typing_extensions import Self

from adafuse_llm import Generation

KEY = "adafuse"
_COMPLETE_RESPONSES = (Response, PydanticResponse, AgentChatResponse)
_STREAMS = (StreamingResponse, AsyncStreamingResponse)

Decisions = list[dict[str, Any]]
"""One `AdaFuseRaw` per generation, as JSON."""

_ACTIVE_LISTS: ContextVar[tuple[Decisions, ...]] = ContextVar("adafuse_readers", default=())
"""The lists of decisions of the streamed responses that are being read in this context."""


def decisions_of(response: Any) -> list[AdaFuseRaw]:
    """Return the decisions that a `DecisionHandler` added to a response.

    Args:
        response: a response of a query engine or chat engine.

    Returns:
        One `AdaFuseRaw` per generation, in the order in which the generations ended; an empty list
        if no handler was active.
    """
    metadata = getattr(response, "metadata", None) or {}
    return [AdaFuseRaw.model_validate(each) for each in metadata.get(KEY, ())]


class DecisionSpan(BaseSpan):
    """A span that collects generations.

    Attributes:
        decisions: the generations that ended in the span.
        outer: the lists of the enclosing spans, which collect the same generations.
    """

    decisions: Decisions = Field(default_factory=list)
    outer: list[Decisions] = Field(default_factory=list)


class DecisionHandler(BaseSpanHandler[DecisionSpan]):
    """A span handler that adds the rounds of a response to the response's metadata.

    It supports query engines and chat engines, with and without streaming.

    For example::

        with DecisionHandler():
            response = query_engine.query("Who founded the mill?")
        decisions_of(response)[-1].summary

    ``response.metadata["adafuse"]`` is a list with one `AdaFuseRaw` per generation as a dict for
    JSON, in the order in which the generations end. `decisions_of` returns the objects. The list of
    a streaming response is complete when the response's text has been read. Concurrent tasks and
    threads have separate lists. The handler is active between `attach` and `detach`, or in a
    ``with`` block. It receives nothing from LLMs with ``emit_events=False``.
    """

    def attach(self) -> Self:
        """Register the handler for all LlamaIndex spans of this process."""
        get_dispatcher().add_span_handler(self)
        return self

    def detach(self) -> None:
        """Remove the handler."""
        root = get_dispatcher()
        root.span_handlers = [handler for handler in root.span_handlers if handler is not self]

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
        enclosing = [parent.decisions, *parent.outer] if parent else []
        span = DecisionSpan(id_=id_, parent_id=parent_span_id)
        span.outer = _different(
            enclosing, _ACTIVE_LISTS.get()
        )  # set here, because the constructor would copy the lists
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
            raw = AdaFuseRaw.of_response(result).model_dump(mode="json")
            for decisions in span.outer:
                decisions.append(raw)
        elif isinstance(result, (*_COMPLETE_RESPONSES, *_STREAMS)):
            result.metadata = {**(result.metadata or {}), KEY: span.decisions}
            lists = [span.decisions, *span.outer]
            if isinstance(result, StreamingResponse):
                result.response_gen = _read(result.response_gen, lists)
            elif isinstance(result, AsyncStreamingResponse):
                result.response_gen = _aread(result.response_gen, lists)
        elif isinstance(result, StreamingAgentChatResponse):
            vars(result)["metadata"] = {KEY: span.decisions}  # the class has no such field
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


# For a streamed response, LlamaIndex calls the LLM only when the response's text is read, possibly
# in another thread. The spans of the query are closed at that time, so the generators below collect
# the decisions.


@contextmanager
def _collect_into(lists: Sequence[Decisions]) -> Iterator[None]:
    """Add the generations that end inside the block to some lists."""
    token = _ACTIVE_LISTS.set(tuple(_different(_ACTIVE_LISTS.get(), lists)))
    try:
        yield
    finally:
        _ACTIVE_LISTS.reset(token)


def _different(*lists: Iterable[Decisions]) -> list[Decisions]:
    """Return all lists, each of them once. Lists with equal content can be different."""
    return list({id(each): each for each in itertools.chain(*lists)}.values())


def _read(tokens: Iterator[str], lists: Sequence[Decisions]) -> Generator[str, None, None]:
    while True:
        with _collect_into(lists):
            token = next(tokens, None)
        if token is None:
            return
        yield token


async def _aread(
    tokens: AsyncIterator[str], lists: Sequence[Decisions]
) -> AsyncGenerator[str, None]:
    while True:
        with _collect_into(lists):
            token = await anext(tokens, None)
        if token is None:
            return
        yield token
