"""Statistics of rounds: who wrote what, words per round, agreement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from adafuse_llm.results import Round

__all__ = ["Summary", "record"]


class Summary(BaseModel):
    """Statistics of the rounds of one or many responses.

    Attributes:
        rounds: number of rounds.
        forced: number of forced rounds (`Round.forced`). Only `rounds` and `seconds` include them.
        asked: number of rounds in which each member was asked (`Round.asked`).
        backed: number of rounds in which each member proposed the committed span.
        decided: number of rounds in which each member alone proposed the committed span.
        words_per_round: number of rounds, by the number of words that they committed. Forced
            rounds and rounds without a word are absent.
        agreement: share of unanimous rounds among those in which several members proposed
            (`Round.is_unanimous`). None if there are no such rounds.
        seconds: wall-clock seconds of all rounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int
    forced: int = 0
    asked: dict[str, int]
    backed: dict[str, int]
    decided: dict[str, int]
    words_per_round: dict[int, int]
    agreement: float | None
    seconds: float

    @classmethod
    def of(cls, rounds: Iterable[Round | Mapping[str, Any]]) -> Summary:
        """Return the statistics of one ensemble's rounds, or of their records (:func:`record`)."""
        records = [each if isinstance(each, Mapping) else record(each) for each in rounds]
        free = [entry for entry in records if not entry["forced"]]
        agreed = [each for entry in records if (each := entry["unanimous"]) is not None]
        asked = Counter(name for entry in records for name in entry["asked"])
        backed, decided = dict.fromkeys(asked, 0), dict.fromkeys(asked, 0)
        for entry in records:
            for name in entry["proposers"]:
                backed[name] += 1
                decided[name] += len(entry["proposers"]) == 1
        words = (len(entry["text"].split()) for entry in free)
        return cls(
            rounds=len(records),
            forced=len(records) - len(free),
            asked=asked,
            backed=backed,
            decided=decided,
            words_per_round=dict(sorted(Counter(filter(None, words)).items())),
            agreement=fmean(agreed) if agreed else None,
            seconds=sum(entry["elapsed"] for entry in records),
        )


def record(done: Round) -> dict[str, Any]:
    """Return a round as plain JSON data, for callbacks, chunks and traces.

    It has the data of `Round` (``round``: its index), and the proposers and score of its winner. If
    the round chose among the ``choices``, it also has the ``probability`` of its choice.
    """
    whole, winner = done.model_dump(mode="json"), done.candidates[done.winner]
    data: dict[str, Any] = {
        "round": done.index,
        "text": done.text,
        "proposers": list(winner.proposers),
        "score": winner.score,
        "asked": list(done.asked),
        "unanimous": done.is_unanimous,
        **{key: whole[key] for key in ("forced", "elapsed", "winner", "candidates", "margins")},
    }
    if (probabilities := done.choice_probabilities) is not None:
        data["probability"] = probabilities[done.winner]
    return {**data, "logprobs": whole["logprobs"]} if done.logprobs else data
