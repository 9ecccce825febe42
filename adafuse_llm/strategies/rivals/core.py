"""CoRE: the union of the members' likeliest tokens, weighted by consistency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.config import GRAMMARS, AdaFuseConfig
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, choose_best
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.strategies.rivals.token_level import normalized_union, scored_by

SMALLEST = 1e-12
"""Probability below which a token counts as impossible, and what is added to each entropy."""


@dataclass(frozen=True)
class CoRE(Strategy):
    """UniTE's union, in which members and tokens that agree with the others have more weight
    (arXiv 2510.13855).

    The first member is the main member, and the others are its assistants. As in `UniTE`, every
    member has a probability p(v) for every text v of the union, normalized over the union. With the
    mean p* over the members, the consistency of a text is s(v) = (exp(-βδ) - exp(-β)) / (1 -
    exp(-β)) with δ = abs(p(v) - p*(v)), and 0 if neither the member nor the main member gives v
    a probability. The consistency of a member is the sum of s(v) over the union, divided by the
    entropy of p in nats. The main member's consistency is raised to the sum of the assistants'
    consistencies if it is lower. The consistencies are then divided by their sum, so the main
    member has at least half of the weight.

    The value of a text is the weighted sum of the members' probabilities, in which each assistant's
    probability is multiplied by s(v), scaled to a mean of 1 over the texts. The text with the
    highest value is committed, with two exceptions. If the main member's likeliest token ends the
    response, the response ends. If the best text and the main member's likeliest text are prefixes
    of one another, the main member's text is committed. The round then has no other candidate.

    The score is -log of the value, which can be above 1. The NLL is -log of the member's normalized
    probability, in nats.

    Cost: one pass per member for each committed token, as in `UniTE`.

    The source lets every assistant normalize over its own likeliest tokens and maps them to the
    main member's tokens. Here, the probabilities are those of `UniTE`. The source has other rules
    for multiple choice, and four other functions of δ. They are left out.

    Args:
        top_k: number of likeliest tokens of each member.
        beta: the factor β, which decides how fast the consistency falls.

    Raises:
        InvalidOptionError: `top_k` is less than one, or `beta` is not positive.
    """

    top_k: int = 10
    beta: float = 2.0

    name = "core"
    options = frozenset(GRAMMARS)

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise InvalidOptionError(f"CoRE(top_k=...) must be 1 or more; got {self.top_k!r}")
        if not 0 < self.beta < math.inf:
            raise InvalidOptionError(f"CoRE(beta=...) must be above 0; got {self.beta!r}")

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, self.top_k)

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members)

    def _play(self, members: Sequence[Member]) -> Steps[RoundOutcome]:
        pool, shares, margins = yield from normalized_union(members, self.top_k)
        values = self._values([[math.exp(share) for share in row] for row in shares])
        scored = scored_by(members, pool.candidates, shares, values)
        outcome = choose_best(pool, scored, margins)
        own, won = pool.candidates[0], pool.candidates[outcome.winner]
        nested = not won.stops and _is_prefix(members[0], own.text, won.text)
        if own is won or not (own.stops or nested):
            return outcome
        del pool.candidates[1:]
        return choose_best(pool, scored[:1], margins)

    def _values(self, chances: Sequence[Sequence[float]]) -> list[float]:
        """Return the value of each text.

        Args:
            chances: the members' probabilities, [member, text]. The first member is the main one.
        """
        means = [math.fsum(column) / len(chances) for column in zip(*chances, strict=True)]
        tokens = [
            [
                self._consistency(p - mean) if p + main > SMALLEST else 0.0
                for p, mean, main in zip(row, means, chances[0], strict=True)
            ]
            for row in chances
        ]
        models = [
            math.fsum(own) / (_entropy(row) + SMALLEST)
            for own, row in zip(tokens, chances, strict=True)
        ]
        models[0] = max(models[0], math.fsum(models[1:]))
        factors = [[1.0] * len(means)]
        for own in tokens[1:]:
            mean = math.fsum(own) / sum(each > 0 for each in own)
            factors.append([each / mean for each in own])
        return [
            math.fsum(m * p * s for m, p, s in zip(models, ps, ss, strict=True)) / math.fsum(models)
            for ps, ss in zip(zip(*chances, strict=True), zip(*factors, strict=True), strict=True)
        ]

    def _consistency(self, gap: float) -> float:
        lowest = math.exp(-self.beta)
        return (math.exp(-self.beta * abs(gap)) - lowest) / (1 - lowest)


def _entropy(chances: Sequence[float]) -> float:
    """Return the entropy of probabilities that sum to one, in nats."""
    return 0.0 - math.fsum(p * math.log(p) for p in chances if p > 0)


def _is_prefix(main: Member, one: str, other: str) -> bool:
    """Return whether one of two texts that begin the same way is a prefix of the other."""
    own, won = main.opening.key(one), main.opening.key(other)
    return own.startswith(won) or won.startswith(own)
