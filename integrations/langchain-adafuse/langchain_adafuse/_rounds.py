"""Report rounds to LangChain's callbacks and tracers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    CallbackManager,
    CallbackManagerForLLMRun,
)

from adafuse_llm import StreamEvent
from adafuse_llm.summary import record

ROUND_EVENT = "adafuse_round"
"""Name of the custom event that reports a round."""

ROUNDS_KEY = "adafuse_rounds"
"""Key of the round records in messages and generations."""

SUMMARY_KEY = "adafuse_summary"
"""Key of the summary of the rounds in the metadata of messages and generations."""

RoundDetail = Literal["none", "summary", "full"]

RoundRecords = list[dict[str, Any]]

ModelRun = CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun


@dataclass(frozen=True)
class RoundReporter:
    """A reporter of the rounds of one model run.

    Args:
        run: the model run whose callbacks receive the rounds; None for no callbacks.
        detail: ``"none"`` to report nothing, ``"summary"`` to report full records to callbacks
            only, ``"full"`` to return them for messages, too.
        traced: whether to report each round as a child run too, because tracers show child runs.
    """

    run: ModelRun | None
    detail: RoundDetail
    traced: bool

    def report(self, event: StreamEvent, **extra: Any) -> list[dict[str, Any]]:
        """Report the round of an event.

        Args:
            event: an event of a stream.
            **extra: keys to add to the record.

        Returns:
            The records to store in messages: one record if `detail` is ``"full"`` and the event has
            a round, otherwise none.
        """
        if not (data := self._record(event, extra)):
            return []
        if self.run is not None:
            manager = CallbackManager(**self._manager_fields())
            manager.on_custom_event(ROUND_EVENT, data, run_id=self.run.run_id)
            if self.traced:
                manager.on_chain_start({}, {}, name=_title(data)).on_chain_end(data)
        return self._stored(data)

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
        return self._stored(data)

    def _record(self, event: StreamEvent, extra: dict[str, Any]) -> dict[str, Any]:
        if event.round is None or self.detail == "none":
            return {}
        return record(event.round) | extra

    def _stored(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        return [data] if self.detail == "full" else []

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
