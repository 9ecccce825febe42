"""The instrumentation event of a round."""

from __future__ import annotations

from llama_index.core.instrumentation.events import BaseEvent

from adafuse_llm import Candidate


class AdaFuseRoundEvent(BaseEvent):
    """One round, with the fields of `adafuse_llm.summary.record`."""

    round: int
    text: str
    proposers: tuple[str, ...]
    score: float | None
    asked: tuple[str, ...]
    unanimous: bool | None
    winner: int
    candidates: tuple[Candidate, ...]
    margins: dict[str, tuple[float, ...]]
    elapsed: float
    forced: bool = False
    probability: float | None = None

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseRoundEvent"
