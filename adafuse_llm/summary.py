"""Rounds in figures: who won, how many words at a time, how often all agreed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from adafuse_llm.results import Round

__all__ = ["Summary", "is_unanimous", "record"]

RoundDetail = Literal["none", "summary", "full"]
"""How much is told of a round: nothing, what was committed and who proposed it, or everything."""


class Summary(BaseModel):
    """The rounds of one response, or of many, in figures. JSON-safe.

    Attributes:
        rounds: their number.
        wins: by member, rounds that committed a span which it had proposed; where several had,
            it counts for each.
        words_per_round: rounds by the number of words they committed (the paper's distribution);
            a round that only ended the response counts as 0.
        agreement: share of unanimous rounds (:func:`is_unanimous`), 0 for a lone member; None
            without rounds.
        mean_margin: by member, mean margin Δ over the words it considered (equation 1); members
            that considered none are left out.
        seconds: of all rounds together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int
    wins: dict[str, int]
    words_per_round: dict[int, int]
    agreement: float | None
    mean_margin: dict[str, float]
    seconds: float

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> Summary:
        """Summarise rounds of one ensemble."""
        return cls.of_records(map(record, rounds))

    @classmethod
    def of_records(cls, records: Iterable[Mapping[str, Any]]) -> Summary:
        """Summarise rounds as :func:`record` tells them. Without their margins (``"summary"``) the
        mean margins stay empty, and so do the wins of members that never won.
        """
        told = list(records)
        margins: dict[str, list[float]] = {}
        for each in told:
            for name, values in each.get("margins", {}).items():
                margins.setdefault(name, []).extend(values)
        wins = dict.fromkeys(margins, 0)
        for each in told:
            for name in each["proposers"]:
                wins[name] = wins.get(name, 0) + 1
        return cls(
            rounds=len(told),
            wins=wins,
            words_per_round=dict(sorted(Counter(len(r["text"].split()) for r in told).items())),
            agreement=fmean(each["unanimous"] for each in told) if told else None,
            mean_margin={name: fmean(values) for name, values in margins.items() if values},
            seconds=sum(each["elapsed"] for each in told),
        )


def proposers(done: Round) -> Sequence[str]:
    """The members that proposed what a round committed."""
    return done.candidates[done.winner].proposers


def is_unanimous(done: Round) -> bool:
    """Whether all of several members proposed one and the same span, and nothing else.

    A member that is unsure proposes alternatives, so a round with more than one candidate is not
    unanimous, even if all members listed the winner. Nor is one that a single member decided.
    """
    members = set(done.margins)
    return len(members) > 1 and len(done.candidates) == 1 and set(proposers(done)) == members


def record(done: Round, detail: RoundDetail = "full") -> dict[str, Any]:
    """A round as plain JSON data, for callbacks, chunks and traces.

    Args:
        done: the round.
        detail: ``"summary"`` for what was committed, by whom, its score, and whether the round was
            ``unanimous`` (:func:`is_unanimous`); ``"full"`` for every candidate and the margins
            besides; ``"none"`` for an empty record.
    """
    if detail == "none":
        return {}
    winner = done.candidates[done.winner]
    told: dict[str, Any] = {
        "round": done.index,
        "text": done.text,
        "proposers": list(winner.proposers),
        "score": winner.score,
        "unanimous": is_unanimous(done),
        "elapsed": done.elapsed,
    }
    if detail == "full":
        whole = done.model_dump(mode="json")
        told |= {key: whole[key] for key in ("winner", "candidates", "margins")}
    return told
