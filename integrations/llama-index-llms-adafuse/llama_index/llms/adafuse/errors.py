"""The error that calls of an LLM raise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from adafuse_llm import AdaFuseError, ContextWindowError

P = ParamSpec("P")
T = TypeVar("T")

PACKING = (
    " LlamaIndex packs prompts by the counts of its own tokenizer. To pack them by the members' "
    "counts, set Settings.prompt_helper = llm.prompt_helper() and Settings.tokenizer = "
    "llm.tokenizer before you create the query engine or chat engine."
)


class AdaFuseLLMError(AdaFuseError):
    """A call of an LLM failed with a `ValueError` or `TypeError`.

    ``__cause__`` is the original error, for example a `ContextWindowError`. LlamaIndex's response
    synthesizers ignore errors of these two types and answer without the context of the failed call.
    This error has neither type, so it reaches the caller of a query engine.
    """


@contextmanager
def adapter_errors() -> Iterator[None]:
    """Raise each `ValueError` and `TypeError` of a block or function as an `AdaFuseLLMError`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        hint = PACKING if isinstance(error, ContextWindowError) else ""
        raise AdaFuseLLMError(f"{error}{hint}") from error


def aadapter_errors(
    method: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate an asynchronous function in the same way as `adapter_errors`."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with adapter_errors():
            return await method(*args, **kwargs)

    return call
