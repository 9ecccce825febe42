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
    """One round: the candidates and the committed text, as `adafuse_llm.summary.record` has them.

    Attributes:
        round: number of the round, from 0.
        text: the committed text.
        proposers: members that proposed the text.
        score: score of the text, in nats. The strategy defines it.
        asked: members that proposed or scored in the round.
        unanimous: whether several members proposed, and all of them the only candidate.
        winner: index of the committed candidate.
        candidates, margins, elapsed, forced: those of the `Round`.
        probability: probability of the text among given texts (the option `choices`).
    """

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
    """The end of a decode. A decode that fails or is stopped early does not emit this event.

    Attributes:
        text: the response.
        strategy: name of the strategy that ran.
        finish_reason: why the decode ended.
        usage: token counts and forward passes by member.
        summary: statistics of the rounds.
        seed: the seed that gives the same response again; None if nothing was drawn.
    """

    text: str
    strategy: str
    finish_reason: FinishReason
    usage: Usage
    summary: Summary
    seed: int | None = None
