"""Report rounds to LangChain's callbacks and tracers, and to LangGraph's streams."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    CallbackManager,
    CallbackManagerForLLMRun,
)

from adafuse_llm import StreamEvent
from adafuse_llm.summary import RoundDetail, record

ROUND_EVENT = "adafuse_round"
"""Name of the custom event that reports a round."""

ROUNDS_KEY = "adafuse_rounds"
"""Key of the round records in messages and generations."""

ModelRun = CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun


def _graph_writer() -> Callable[[Any], None] | None:
    """Return the ``stream_mode="custom"`` writer of the running LangGraph graph, if any."""
    langgraph = sys.modules.get("langgraph.config")
    if langgraph is None:
        return None
    try:
        return cast("Callable[[Any], None]", langgraph.get_stream_writer())
    except (RuntimeError, KeyError):  # called outside of a graph
        return None


@dataclass(frozen=True)
class RoundReporter:
    """A reporter of the rounds of one model run.

    Args:
        run: the model run whose callbacks receive the rounds; None for no callbacks.
        detail: how much to report about each round.
        traced: whether to report each round as a child run too, because tracers show child runs.
    """

    run: ModelRun | None
    detail: RoundDetail
    traced: bool
    _write: Callable[[Any], None] | None = field(default_factory=_graph_writer)

    def report(self, event: StreamEvent, **extra: Any) -> list[dict[str, Any]]:
        """Report the round of an event.

        Args:
            event: an event of a stream.
            **extra: keys to add to the record.

        Returns:
            A list with the round's record. The list is empty if the event has no round, or if
            `detail` is ``"none"``.
        """
        if not (data := self._record(event, extra)):
            return []
        if self.run is not None:
            manager = CallbackManager(**self._manager_fields())
            manager.on_custom_event(ROUND_EVENT, data, run_id=self.run.run_id)
            if self.traced:
                manager.on_chain_start({}, {}, name=_title(data)).on_chain_end(data)
        return [data]

    async def areport(self, event: StreamEvent, **extra: Any) -> list[dict[str, Any]]:
        """Report the round of an event as `report` does, but await the callbacks."""
        if not (data := self._record(event, extra)):
            return []
        if self.run is not None:
            manager = AsyncCallbackManager(**self._manager_fields())
            await manager.on_custom_event(ROUND_EVENT, data, run_id=self.run.run_id)
            if self.traced:
                child = await manager.on_chain_start({}, {}, name=_title(data))
                await child.on_chain_end(data)
        return [data]

    def _record(self, event: StreamEvent, extra: dict[str, Any]) -> dict[str, Any]:
        if event.round is None or not (data := record(event.round, self.detail)):
            return {}
        data |= extra
        if self._write is not None:
            self._write({"type": ROUND_EVENT, **data})
        return data

    def _manager_fields(self) -> dict[str, Any]:
        run = cast("ModelRun", self.run)
        return {
            "handlers": run.handlers,
            "inheritable_handlers": run.inheritable_handlers,
            "parent_run_id": run.run_id,
            "tags": run.tags,
            "metadata": run.metadata,
        }


def _title(data: dict[str, Any]) -> str:
    return f"{ROUND_EVENT} {data['round']}"
