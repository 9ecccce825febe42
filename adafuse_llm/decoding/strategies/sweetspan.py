"""SweetSpan: spans chosen by the perplexities that can be believed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from typing_extensions import override

from adafuse_llm import results
from adafuse_llm.decoding.member import Member
from adafuse_llm.decoding.rounds import judged
from adafuse_llm.decoding.score import Candidate, fuse
from adafuse_llm.decoding.strategies.fixed import GreedyWords
from adafuse_llm.errors import InvalidOptionError


class SweetSpan(GreedyWords):
    """Spans of a fixed number of words, chosen by perplexity (arXiv 2409.18583).

    Every member proposes a greedy span, every member rates every span by its perplexity, and
    ratings that are out of proportion are not believed: those more than `ratio` times the
    lowest that the span got. NLL: mean nats per token, the logarithm of the perplexity; score: the
    mean of what is believed, so that the lowest geometric mean of perplexities wins.

    Args:
        words: words per span.
        ratio: the highest believed rating by the lowest; infinite to believe all.

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
    def judge(self, candidate: Candidate, members: Sequence[Member]) -> results.Candidate:
        nll = [candidate.nll(member) for member in members]
        believed = min(nll) + math.log(self.ratio)
        kept = [value if value <= believed else math.inf for value in nll]
        return judged(candidate, members, nll, fuse(kept, [member.weight for member in members]))
