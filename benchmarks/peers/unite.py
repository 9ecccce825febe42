"""UniTE: the union of the members' likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm import AdaFuseConfig
from adafuse_llm.strategies import (
    MemberState,
    PlayRound,
    RoundOutcome,
    Steps,
    Strategy,
    StrategyContext,
    choose_best,
    in_lockstep,
)
from benchmarks.peers.token_level import averaged, first_logprobs, offer, union


@dataclass(frozen=True)
class UniTE(Strategy):
    """The union of the members' k likeliest next tokens (arXiv 2410.03777).

    Every member gives a probability to every text of the union: that of the token that it proposed,
    or else that of the first token of its encoding of the text. Each member's probabilities are
    normalized over the union, and then averaged. The likeliest text is committed.

    The score is -log of the weighted average. The NLL is -log of the member's normalized
    probability, in nats. Cost: one pass per member for each committed token.

    Args:
        top_k: number k of likeliest tokens of each member.
    """

    top_k: int = 10

    name = "unite"
    options = frozenset({"weights"})

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, self.top_k)

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members)

    def _play(self, members: Sequence[MemberState]) -> Steps[RoundOutcome]:
        proposals = yield from in_lockstep([offer(member, self.top_k) for member in members])
        pool, margins = union(members, proposals)
        logprobs = yield from first_logprobs(members, pool)
        shares = [_normalized(row) for row in logprobs]
        return choose_best(pool, averaged(members, pool.candidates, shares), margins)


def _normalized(logprobs: Sequence[float]) -> list[float]:
    """Shift log-probabilities so that the probabilities sum to one."""
    highest = max(logprobs)
    total = highest + math.log(math.fsum(math.exp(value - highest) for value in logprobs))
    return [value - total for value in logprobs]
