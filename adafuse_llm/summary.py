"""Statistics of rounds: rounds by member, words per round, agreement."""

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
    """Statistics of the rounds of one or many responses. They can be written as JSON.

    Attributes:
        rounds: number of rounds.
        forced: number of rounds whose text was forced (`Round.forced`). No member proposed or
            scored it, so these rounds count in `rounds` and `seconds` only.
        asked: number of rounds in which each member was asked (`Round.asked`).
        backed: number of rounds that each member backed. A member backs a round if it proposed the
            committed span. A span with several proposers counts for each of them.
        decided: number of rounds that each member decided. A member decides a round if no other
            member proposed the committed span, because the others proposed other spans or were not
            asked for one. A span with several proposers counts for none of them.
        words_per_round: number of rounds that committed 1 word, 2 words and so on (the paper's
            distribution). Forced rounds, and rounds without a word, such as one that only ended
            the response, are absent.
        agreement: share of unanimous rounds among the rounds in which several members proposed
            (`Round.is_unanimous`). None if there are no such rounds.
        mean_margin: mean margin Δ by member, over the words that the member considered
            (equation 1). Members that considered no words are absent.
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
    mean_margin: dict[str, float]
    seconds: float

    @classmethod
    def of(cls, rounds: Iterable[Round | Mapping[str, Any]]) -> Summary:
        """Summarize rounds of one ensemble, or the records that :func:`record` returns."""
        records = [each if isinstance(each, Mapping) else record(each) for each in rounds]
        free = [entry for entry in records if not entry["forced"]]
        agreed = [each for entry in records if (each := entry["unanimous"]) is not None]
        margins: dict[str, list[float]] = {}
        for entry in records:
            for name, values in entry["margins"].items():
                margins.setdefault(name, []).extend(values)
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
            mean_margin={name: fmean(values) for name, values in margins.items() if values},
            seconds=sum(entry["elapsed"] for entry in records),
        )


def record(done: Round) -> dict[str, Any]:
    """Return a round as plain JSON data, for callbacks, chunks and traces.

    It has the committed text, its proposers and its score, the members that were ``asked``
    (`Round.asked`), every candidate and the margins, and says whether the round was ``unanimous``
    (`Round.is_unanimous`) or ``forced`` (`Round.forced`). A round that chose among given texts also
    has the ``probability`` of the chosen text (`Round.choice_probabilities`). A round with
    log-probabilities has the ``logprobs`` of its tokens by member (`Round.logprobs`).
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
