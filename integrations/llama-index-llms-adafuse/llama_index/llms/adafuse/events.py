"""Instrumentation events of a decode, in its span: its start, each round and its end."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events import BaseEvent

from adafuse_llm import Candidate, Usage
from adafuse_llm.results import FinishReason
from adafuse_llm.summary import Summary


class _Event(BaseEvent):
    @classmethod
    def class_name(cls) -> str:
        return cls.__name__


class AdaFuseGenerationStartEvent(_Event):
    """The start of a decode.

    Attributes:
        members: names of the active members.
        options: all options of the decode, by their names in `AdaFuseConfig`.
    """

    members: tuple[str, ...]
    options: dict[str, Any]


class AdaFuseRoundEvent(_Event):
    """One round, with what `adafuse_llm.summary.record` says of it."""

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


class AdaFuseGenerationEndEvent(_Event):
    """The end of a decode: parts of its `Generation`, with a summary of the rounds.

    A decode that fails or is stopped early does not emit this event.
    """

    text: str
    strategy: str
    finish_reason: FinishReason
    usage: Usage
    summary: Summary
    seed: int | None = None
