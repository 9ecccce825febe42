"""GaC: the average over the union of the vocabularies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, commit_best, to_result
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.strategies.token_level import (
    LISTED,
    averaged,
    first_logprobs,
    offer,
    suggest,
    union,
)

WIDER = 4
"""How many times more tokens are listed each time that it is not enough to be sure."""


@dataclass(frozen=True)
class GaC(Strategy):
    """The average of the members' distributions over the union of their vocabularies
    (arXiv 2406.12585).

    A member's token for a text is the one among its ten likeliest, else the one that its tokenizer
    writes; a text that takes it several tokens has probability zero there. The likeliest on average
    is committed. With a threshold, one member, the gate, decides alone where the probability of its
    likeliest token reaches it; the others read on when they are next asked. The first word is
    always everybody's, as each member begins a response in its own way.

    Score: -log of the weighted average. NLL: -log of the member's probability, in nats.
    Cost: one pass per member for each committed token; where the gate decides, one of the gate.

    The choice is that of whole distributions, without asking for them: only texts among the
    members' likeliest tokens are looked at. Any other has at most the average of the members' least
    likely listed tokens; while that could win, more are listed, which costs no pass.

    Args:
        threshold: probability from which the gate decides alone; None for never.
        gate: the gate's name; default: the first member that decodes.

    Raises:
        InvalidOptionError: the threshold is not a probability.
    """

    threshold: float | None = None
    gate: str | None = None

    options = frozenset({"weights"})

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise InvalidOptionError(
                f"GaC(threshold=...) must be between 0 and 1, or None; got {self.threshold!r}"
            )
        if self.threshold is None and self.gate is not None:
            raise InvalidOptionError(
                f"GaC(gate={self.gate!r}) does nothing without a threshold; give one, such as "
                "threshold=0.5"
            )

    @property
    @override
    def name(self) -> str:
        return "gac" if self.threshold is None else "gac-gated"

    @override
    def check(self, members: Sequence[Backend]) -> None:
        names = [member.name for member in members]
        if self.gate is not None and self.gate not in names:
            raise InvalidInputError(
                f"GaC(gate=...) must be a member that decodes ({', '.join(names)}); "
                f"got {self.gate!r}"
            )

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return LISTED

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        members = context.members
        gates = [member for member in members if member.name == self.gate]
        return partial(self._play, members, (gates or members)[0])

    def _play(
        self, members: Sequence[Member], gate: Member, first_word: bool
    ) -> Steps[RoundOutcome]:
        if self.threshold is not None and not first_word:
            offered = yield from offer(gate, 1)
            if math.exp(gate.next(gate.tree.root).logprobs[0]) >= self.threshold:
                return self._alone(members, gate, offered)
        proposals = yield from in_lockstep([offer(member, LISTED) for member in members])
        pool = union(members, proposals, first_word=first_word)
        pool.suggest("", stops=True)
        listed = LISTED
        while True:
            logprobs = yield from first_logprobs(members, pool, whole=True)
            scored = averaged(members, pool.candidates, logprobs)
            best = min((each.score for each in scored if each.score is not None), default=math.inf)
            if math.exp(-best) >= _unlisted(members, listed):
                break
            listed *= WIDER
            yield from in_lockstep([suggest(member, pool, listed) for member in members])
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return commit_best(pool, scored, margins)

    def _alone(self, members: Sequence[Member], gate: Member, offered: Proposal) -> RoundOutcome:
        """The gate's likeliest token is committed to all."""
        pool = union([gate], [offered], first_word=False)
        (candidate,) = pool.candidates
        for member in members:
            pool.place(member, candidate)
        nll = 0.0 - gate.next(gate.tree.root).logprobs[0]
        scored = to_result(candidate, [gate], [nll], nll)
        margins = {m.name: offered.margins if m is gate else () for m in members}
        return commit_best(pool, [scored], margins)


def _unlisted(members: Sequence[Member], listed: int) -> float:
    """The highest average of a text that is nobody's listed token; a member that has listed fewer
    has no more.
    """
    bound = 0.0
    for member in members:
        logprobs = member.next(member.tree.root).logprobs
        if len(logprobs) >= listed:
            bound += member.weight * math.exp(logprobs[listed - 1])
    return bound / math.fsum(member.weight for member in members)
