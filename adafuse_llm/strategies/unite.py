"""UniTE: the union of the members' likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, commit_best
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.strategies.token_level import averaged, first_logprobs, offer, union


@dataclass(frozen=True)
class UniTE(Strategy):
    """The union of the members' k likeliest next tokens (arXiv 2410.03777).

    Every member gives each text of the union the probability of its own token for it, or of the
    first token of its encoding; over the union these are made to sum to one, and averaged. The
    likeliest text is committed.

    Score: -log of the weighted average. NLL: -log of the member's share of the union, in nats.
    Cost: one pass per member for each committed token.

    Args:
        top_k: k.

    Raises:
        InvalidOptionError: it is less than one.
    """

    top_k: int = 10

    name = "unite"
    options = frozenset({"weights"})

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise InvalidOptionError(f"UniTE(top_k=...) must be 1 or more; got {self.top_k!r}")

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, self.top_k)

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members)

    def _play(self, members: Sequence[Member], first_word: bool) -> Steps[RoundOutcome]:
        proposals = yield from in_lockstep([offer(member, self.top_k) for member in members])
        pool = union(members, proposals, first_word=first_word)
        logprobs = yield from first_logprobs(members, pool)
        shares = [_normalised(row) for row in logprobs]
        scored = averaged(members, pool.candidates, shares)
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return commit_best(pool, scored, margins)


def _normalised(logprobs: Sequence[float]) -> list[float]:
    """Log-probabilities, made to sum to one."""
    highest = max(logprobs)
    total = highest + math.log(math.fsum(math.exp(each - highest) for each in logprobs))
    return [each - total for each in logprobs]
