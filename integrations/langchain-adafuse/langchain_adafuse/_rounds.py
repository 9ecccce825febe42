"""Rounds told where LangChain looks for them: callbacks, traces, streams of graphs."""

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
"""Name of the custom event that every round dispatches."""

ROUNDS_KEY = "adafuse_rounds"
"""Where messages and generations hold the records of their rounds."""

ModelRun = CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun


def _graph_writer() -> Callable[[Any], None] | None:
    """What feeds ``stream_mode="custom"`` of the LangGraph graph that is running, if one is."""
    langgraph = sys.modules.get("langgraph.config")
    if langgraph is None:
        return None
    try:
        return cast("Callable[[Any], None]", langgraph.get_stream_writer())
    except (RuntimeError, KeyError):  # no graph runs here
        return None


@dataclass(frozen=True)
class RoundReporter:
    """Tells the rounds of a model's run as they come.

    Args:
        run: the run whose id the events carry; None to tell no callback.
        detail: how much is told.
        traced: whether each round becomes a child run, which tracers show.
    """

    run: ModelRun | None
    detail: RoundDetail
    traced: bool
    _write: Callable[[Any], None] | None = field(default_factory=_graph_writer)

    def tell(self, event: StreamEvent, **also: Any) -> list[dict[str, Any]]:
        """Tell the round of an event, and return its record; nothing where none is to be told."""
        if not (told := self._record(event, also)):
            return []
        if self.run is not None:
            manager = CallbackManager(**self._under_the_run())
            manager.on_custom_event(ROUND_EVENT, told, run_id=self.run.run_id)
            if self.traced:
                manager.on_chain_start({}, {}, name=_title(told)).on_chain_end(told)
        return [told]

    async def atell(self, event: StreamEvent, **also: Any) -> list[dict[str, Any]]:
        """`tell` on an event loop."""
        if not (told := self._record(event, also)):
            return []
        if self.run is not None:
            manager = AsyncCallbackManager(**self._under_the_run())
            await manager.on_custom_event(ROUND_EVENT, told, run_id=self.run.run_id)
            if self.traced:
                child = await manager.on_chain_start({}, {}, name=_title(told))
                await child.on_chain_end(told)
        return [told]

    def _record(self, event: StreamEvent, also: dict[str, Any]) -> dict[str, Any]:
        if event.round is None or not (told := record(event.round, self.detail)):
            return {}
        told |= also
        if self._write is not None:
            self._write({"type": ROUND_EVENT, **told})
        return told

    def _under_the_run(self) -> dict[str, Any]:
        run = cast("ModelRun", self.run)
        return {
            "handlers": run.handlers,
            "inheritable_handlers": run.inheritable_handlers,
            "parent_run_id": run.run_id,
            "tags": run.tags,
            "metadata": run.metadata,
        }


def _title(told: dict[str, Any]) -> str:
    return f"{ROUND_EVENT} {told['round']}"
