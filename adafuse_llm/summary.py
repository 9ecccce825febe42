"""Statistics of rounds: rounds by member, words per round, agreement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from adafuse_llm.results import Round

__all__ = ["Summary", "asked", "choice_probabilities", "is_unanimous", "record"]


class Summary(BaseModel):
    """Statistics of the rounds of one or many responses. They can be written as JSON.

    Attributes:
        rounds: number of rounds.
        forced: number of rounds whose text was forced (`Round.forced`). No member proposed or
            scored it, so these rounds count in `rounds` and `seconds` only.
        asked: number of rounds in which each member was asked (:func:`asked`).
        backed: number of rounds that each member backed. A member backs a round if it proposed the
            committed span. A span with several proposers counts for each of them.
        decided: number of rounds that each member decided. A member decides a round if no other
            member proposed the committed span, because the others proposed other spans or were not
            asked for one. A span with several proposers counts for none of them.
        words_per_round: number of rounds that committed 1 word, 2 words and so on (the paper's
            distribution). Forced rounds, and rounds without a word, such as one that only ended
            the response, are absent.
        agreement: share of unanimous rounds among the rounds in which several members proposed
            (:func:`is_unanimous`). None if there are no such rounds.
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
        records = [record(each) if isinstance(each, Round) else each for each in rounds]
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


def asked(done: Round) -> tuple[str, ...]:
    """Return the members that proposed or scored in a round. A strategy need not ask all."""
    named = (name for each in done.candidates for name in (*each.proposers, *each.nll))
    return tuple(dict.fromkeys([*done.margins, *named]))


def is_unanimous(done: Round) -> bool | None:
    """Return whether several members proposed the same span, and no other span was proposed.

    A round with more than one candidate is not unanimous, even if all members proposed the winner.
    Members that are unsure propose alternatives. The result is None if fewer than two members
    proposed, because then nobody could agree or disagree: one member decodes, a strategy such as
    ``mixture`` did not need the proposals of others, or the round is forced or chose among given
    texts.
    """
    members = {name for candidate in done.candidates for name in candidate.proposers}
    return len(done.candidates) == 1 if len(members) > 1 else None


def choice_probabilities(done: Round) -> tuple[float, ...] | None:
    """Return the probability of each candidate of a round that chose among given texts.

    The option `choices` makes such a round: the candidates are the given texts, which no member
    proposed. The probabilities are the softmax of the negative fused scores. For every other round,
    the result is None.
    """
    if done.forced or any(done.margins.values()):
        return None
    scores = [each.score for each in done.candidates if each.ends and not each.proposers]
    finite = [score for score in scores if score is not None]
    if not finite or len(finite) < len(done.candidates):
        return None
    powers = [math.exp(min(finite) - score) for score in finite]
    return tuple(power / sum(powers) for power in powers)


def record(done: Round) -> dict[str, Any]:
    """Return a round as plain JSON data, for callbacks, chunks and traces.

    It has the committed text, its proposers and its score, the members that were ``asked``
    (:func:`asked`), every candidate and the margins, and says whether the round was ``unanimous``
    (:func:`is_unanimous`) or ``forced`` (`Round.forced`). A round that chose among given texts also
    has the ``probability`` of the chosen text (:func:`choice_probabilities`). A round with
    log-probabilities has the ``logprobs`` of its tokens by member (`Round.logprobs`).
    """
    whole, winner = done.model_dump(mode="json"), done.candidates[done.winner]
    data: dict[str, Any] = {
        "round": done.index,
        "text": done.text,
        "proposers": list(winner.proposers),
        "score": winner.score,
        "asked": list(asked(done)),
        "unanimous": is_unanimous(done),
        **{key: whole[key] for key in ("forced", "elapsed", "winner", "candidates", "margins")},
    }
    if (probabilities := choice_probabilities(done)) is not None:
        data["probability"] = probabilities[done.winner]
    return {**data, "logprobs": whole["logprobs"]} if done.logprobs else data
