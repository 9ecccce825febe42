"""UniTE: the union of the members' likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.config import GRAMMARS, AdaFuseConfig
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, choose_best
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.strategies.rivals.token_level import averaged, normalized_union


@dataclass(frozen=True)
class UniTE(Strategy):
    """The union of the members' k likeliest next tokens (arXiv 2410.03777).

    Every member gives a probability to every text of the union. If the member proposed the text,
    this is the probability of the proposed token. Otherwise, it is the probability of the first
    token of the member's encoding of the text. Each member's probabilities are normalized over the
    union, and then the members' probabilities are averaged. The likeliest text is committed.

    The score is -log of the weighted average. The NLL is -log of the member's normalized
    probability, in nats.

    Cost: one pass per member for each committed token.

    Args:
        top_k: number k of likeliest tokens of each member.

    Raises:
        InvalidOptionError: `top_k` is less than one.
    """

    top_k: int = 10

    name = "unite"
    options = frozenset({*GRAMMARS, "weights"})

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise InvalidOptionError(f"UniTE(top_k=...) must be 1 or more; got {self.top_k!r}")

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, self.top_k)

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members)

    def _play(self, members: Sequence[Member]) -> Steps[RoundOutcome]:
        pool, shares, margins = yield from normalized_union(members, self.top_k)
        return choose_best(pool, averaged(members, pool.candidates, shares), margins)
