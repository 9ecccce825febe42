"""SweetSpan: spans chosen by perplexity, without extreme values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from adafuse_llm import AdaFuseConfig, Candidate
from adafuse_llm.strategies import AdaFuse, MemberState, PoolCandidate, fuse, to_result


@dataclass(frozen=True)
class SweetSpan(AdaFuse):
    """Spans of a fixed number of words, chosen by perplexity (arXiv 2409.18583).

    Every member proposes a greedy span, and computes the perplexity of every proposed span. If the
    highest perplexity of a span is more than `ratio` times the lowest, both are ignored. If no
    other perplexities exist, the lowest one is kept. Perplexities of members with a weight of 0 are
    always ignored. The NLL is the mean in nats per token, which is the logarithm of the perplexity.
    The score is the mean of the NLLs that are kept. The span with the lowest score therefore has
    the lowest geometric mean of perplexities.

    Args:
        words: words per span.
        ratio: maximum ratio of the highest to the lowest perplexity at which both are kept.
            Infinity keeps all values.
    """

    name = "sweetspan"
    options = AdaFuse.options - {"margin_threshold", "max_words", "branching_factor"}
    words: int = 4
    ratio: float = 10.0

    @override
    def rule(self, config: AdaFuseConfig) -> AdaFuseConfig:
        always_sure = {"margin_threshold": 0.0, "max_words": self.words, "branching_factor": 1}
        return config.override(always_sure)

    @override
    def scorer(self, candidate: PoolCandidate, members: Sequence[MemberState]) -> Candidate:
        nll = [candidate.nll(member) for member in members]
        weights = [member.weight for member in members]
        counted = [n if w > 0 else math.inf for n, w in zip(nll, weights, strict=True)]
        kept = _without_extremes(counted, math.log(self.ratio))
        return to_result(candidate, members, nll, fuse(kept, weights))


def _without_extremes(nll: Sequence[float], most: float) -> list[float]:
    """Replace the lowest and the highest NLL with infinity if they differ by more than `most`.

    If no other values exist, keep the lowest ones.
    """
    finite = [value for value in nll if math.isfinite(value)]
    if not finite or max(finite) - min(finite) <= most:
        return list(nll)
    between = [value for value in finite if min(finite) < value < max(finite)]
    kept = between or [min(finite)]
    return [value if value in kept else math.inf for value in nll]
