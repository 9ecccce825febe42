"""Instrumentation events of a decode: its beginning, every round, its end.

They are dispatched under a span of their own, a child of the span of the call that asked, which
lasts as long as the decode does.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events import BaseEvent

from adafuse_llm import Candidate, Usage
from adafuse_llm.results import FinishReason
from adafuse_llm.summary import Summary


class AdaFuseGenerationStartEvent(BaseEvent):
    """A decode begins.

    Attributes:
        members: names of the members that decode.
        options: the options in force, as `AdaFuseConfig` has them.
    """

    members: tuple[str, ...]
    options: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseGenerationStartEvent"


class AdaFuseRoundEvent(BaseEvent):
    """A round was played: what was proposed, and what was committed.

    Attributes:
        round: number of the round, from 0.
        text: what it committed.
        proposers: members that proposed it.
        score: its fused score, nats per token.
        unanimous: whether all of several members proposed it, and nothing else was proposed
            (``adafuse_llm.summary.is_unanimous``).
        winner: its place among the candidates.
        candidates: the pool.
        margins: by member, its margin at the start of each word that it considered.
        elapsed: seconds.
    """

    round: int
    text: str
    proposers: tuple[str, ...]
    score: float | None
    unanimous: bool
    winner: int
    candidates: tuple[Candidate, ...]
    margins: dict[str, tuple[float, ...]]
    elapsed: float

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseRoundEvent"


class AdaFuseGenerationEndEvent(BaseEvent):
    """A decode came to its end. One that failed, or was left early, has no such event.

    Attributes:
        text: the response.
        finish_reason: why it ended.
        usage: what it cost, by member.
        summary: its rounds in figures.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    summary: Summary

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseGenerationEndEvent"
