"""SweetSpan: spans chosen by the perplexities that can be believed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from typing_extensions import override

from adafuse_llm import results
from adafuse_llm.decoding.member import Member
from adafuse_llm.decoding.rounds import to_result
from adafuse_llm.decoding.score import PoolCandidate, fuse
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.strategies.fixed import GreedyWords


class SweetSpan(GreedyWords):
    """Spans of a fixed number of words, chosen by perplexity (arXiv 2409.18583).

    Every member proposes a greedy span, and every member rates every span by its perplexity. Where
    the highest rating of a span is more than `ratio` times the lowest, neither is believed; of two
    ratings the lower one is. NLL: mean nats per token, the logarithm of the perplexity; score: the
    mean of what is believed, so that the lowest geometric mean of perplexities wins.

    Args:
        words: words per span.
        ratio: from which the extremes are not believed; infinite to believe all.

    Raises:
        InvalidOptionError: fewer than one word, or a ratio below one.
    """

    name = "sweetspan"

    def __init__(self, words: int = 4, ratio: float = 10.0) -> None:
        super().__init__(words)
        if not ratio >= 1:
            raise InvalidOptionError(f"SweetSpan(ratio=...) must be 1 or more; got {ratio!r}")
        self.ratio = ratio

    @override
    def scorer(self, candidate: PoolCandidate, members: Sequence[Member]) -> results.Candidate:
        nll = [candidate.nll(member) for member in members]
        kept = _believed(nll, math.log(self.ratio))
        return to_result(candidate, members, nll, fuse(kept, [member.weight for member in members]))


def _believed(nll: Sequence[float], most: float) -> list[float]:
    """Ratings without the extremes where these are more than `most` apart; infinity stands for
    what is left out.
    """
    told = [value for value in nll if math.isfinite(value)]
    if not told or max(told) - min(told) <= most:
        return list(nll)
    between = [value for value in told if min(told) < value < max(told)]
    kept = between or [min(told)]
    return [value if value in kept else math.inf for value in nll]
