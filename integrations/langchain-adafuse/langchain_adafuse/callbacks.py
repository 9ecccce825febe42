"""Callbacks that collect the rounds of runs, and summarize them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from adafuse_llm.summary import Summary
from langchain_adafuse._calls import Told


class RoundCallbackHandler(BaseCallbackHandler):
    """A callback handler that collects the rounds of a run and its child runs.

    Attributes:
        rounds: one record (``adafuse_llm.summary.record``) per round, in order of arrival, with the
            ``run_id`` of the model's run. Records of a text model have the number of the ``prompt``
            in the batch. With `n` above 1, records also have the number of the ``response``. There
            are no records of models with ``round_detail="none"``.
    """

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []

    def on_llm_new_token(
        self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any
    ) -> None:
        if isinstance(chunk, Told):
            self.rounds += [{"run_id": str(run_id), **played} for played in chunk.rounds]

    def summary(self) -> Summary:
        """Return statistics of the rounds, such as their agreement."""
        return Summary.of(self.rounds)


_HANDLER: ContextVar[RoundCallbackHandler | None] = ContextVar("adafuse_rounds", default=None)
register_configure_hook(_HANDLER, inheritable=True)


@contextmanager
def get_round_callback() -> Iterator[RoundCallbackHandler]:
    """Yield a handler that collects the rounds of all models that run inside the block."""
    handler = RoundCallbackHandler()
    token = _HANDLER.set(handler)
    try:
        yield handler
    finally:
        _HANDLER.reset(token)
