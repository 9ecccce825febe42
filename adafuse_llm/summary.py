"""Statistics of rounds: rounds by member, words per round, agreement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from adafuse_llm.results import Round

__all__ = ["Summary", "choice_probabilities", "is_unanimous", "record"]

RoundDetail = Literal["none", "summary", "full"]
"""What the record of a round contains: nothing, a summary, or everything (see `record`)."""


class Summary(BaseModel):
    """Statistics of the rounds of one or many responses. They can be written as JSON.

    Attributes:
        rounds: number of rounds.
        forced: number of rounds whose text was forced (`Round.forced`). No member proposed or
            scored it, so these rounds count in `rounds` and `seconds` only.
        backed: number of rounds that each member backed. A member backs a round if it proposed the
            committed span. A span with several proposers counts for each of them.
        decided: number of rounds that each member decided. A member decides a round if no other
            member proposed the committed span. Without this member, the span would not have been a
            candidate. A span with several proposers counts for none of them.
        words_per_round: number of rounds that committed 0 words, 1 word, 2 words and so on (the
            paper's distribution). A round that only ended the response committed 0 words. Forced
            rounds are absent.
        agreement: share of unanimous rounds (:func:`is_unanimous`) among the rounds in which
            members made proposals. Rounds that are forced or choose among given texts do not count.
            It is 0 for a single member, and None if there are no such rounds.
        mean_margin: mean margin Δ by member, over the words that the member considered
            (equation 1). Members that considered no words are absent.
        seconds: wall-clock seconds of all rounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int
    forced: int = 0
    backed: dict[str, int]
    decided: dict[str, int]
    words_per_round: dict[int, int]
    agreement: float | None
    mean_margin: dict[str, float]
    seconds: float

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> Summary:
        """Summarize rounds of one ensemble."""
        return cls.of_records(map(record, rounds))

    @classmethod
    def of_records(cls, records: Iterable[Mapping[str, Any]]) -> Summary:
        """Summarize rounds from the records that :func:`record` returns.

        Records with the detail ``"summary"`` have no margins. A summary of such records has an
        empty `mean_margin`, and its `backed` and `decided` lack members that backed no round.
        """
        records = list(records)
        free = [entry for entry in records if not entry.get("forced")]
        proposed = [entry for entry in free if "probability" not in entry]
        margins: dict[str, list[float]] = {}
        for entry in records:
            for name, values in entry.get("margins", {}).items():
                margins.setdefault(name, []).extend(values)
        backed = dict.fromkeys(margins, 0)
        for entry in records:
            for name in entry["proposers"]:
                backed[name] = backed.get(name, 0) + 1
        decided = dict.fromkeys(backed, 0)
        for entry in records:
            if len(entry["proposers"]) == 1:
                decided[entry["proposers"][0]] += 1
        return cls(
            rounds=len(records),
            forced=len(records) - len(free),
            backed=backed,
            decided=decided,
            words_per_round=dict(sorted(Counter(len(r["text"].split()) for r in free).items())),
            agreement=fmean(r["unanimous"] for r in proposed) if proposed else None,
            mean_margin={name: fmean(values) for name, values in margins.items() if values},
            seconds=sum(r["elapsed"] for r in records),
        )


def proposers(done: Round) -> Sequence[str]:
    """Return the members that proposed the committed span."""
    return done.candidates[done.winner].proposers


def is_unanimous(done: Round) -> bool:
    """Return whether all members proposed the same span, and no other span was proposed.

    A round with more than one candidate is not unanimous, even if all members proposed the winner.
    Members that are unsure propose alternatives. A round with a single member is not unanimous
    either.
    """
    members = set(done.margins)
    return len(members) > 1 and len(done.candidates) == 1 and set(proposers(done)) == members


def choice_probabilities(done: Round) -> tuple[float, ...] | None:
    """Return the probability of each candidate of a round that chose among given texts.

    The option `choices` makes such a round: the candidates are the given texts, which no member
    proposed. The probabilities are the softmax of the negative fused scores. For every other round,
    the result is None.
    """
    if done.forced or any(done.margins.values()):
        return None
    scores = [each.score for each in done.candidates if each.stops and not each.proposers]
    finite = [score for score in scores if score is not None]
    if not finite or len(finite) < len(done.candidates):
        return None
    powers = [math.exp(min(finite) - score) for score in finite]
    return tuple(power / sum(powers) for power in powers)


def record(done: Round, detail: RoundDetail = "full") -> dict[str, Any]:
    """Return a round as plain JSON data, for callbacks, chunks and traces.

    Args:
        done: the round.
        detail: what the record contains. ``"summary"`` includes the committed text, its proposers,
            its score, and whether the round was ``unanimous`` (:func:`is_unanimous`) or ``forced``
            (`Round.forced`). A round that chose among given texts also has the ``probability`` of
            the chosen text (:func:`choice_probabilities`). A round with log-probabilities has the
            ``logprobs`` of its tokens by member (`Round.logprobs`). ``"full"`` adds every candidate
            and the margins. ``"none"`` returns an empty record.
    """
    if detail == "none":
        return {}
    winner = done.candidates[done.winner]
    data: dict[str, Any] = {
        "round": done.index,
        "text": done.text,
        "proposers": list(winner.proposers),
        "score": winner.score,
        "unanimous": is_unanimous(done),
        "forced": done.forced,
        "elapsed": done.elapsed,
    }
    probabilities = choice_probabilities(done)
    if probabilities is not None:
        data["probability"] = probabilities[done.winner]
    if done.logprobs:
        data |= done.model_dump(mode="json", include={"logprobs"})
    if detail == "full":
        whole = done.model_dump(mode="json")
        data |= {key: whole[key] for key in ("winner", "candidates", "margins")}
    return data
