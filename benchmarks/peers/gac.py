"""GaC: the average of the distributions over the union of the vocabularies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import GRAMMARS, AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, choose_best, to_result
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext, check_whole
from adafuse_llm.strategies.rivals.token_level import (
    LISTED,
    averaged,
    first_logprobs,
    offer,
    suggest,
    union,
)

GATED_THRESHOLD = 0.5
"""Threshold of the name ``gac-gated``."""

GROWTH = 4
"""Factor by which the number of listed tokens grows while the choice is not certain."""


@dataclass(frozen=True)
class GaC(Strategy):
    """The average of the members' distributions over the union of their vocabularies
    (arXiv 2406.12585).

    A member looks for a text among its ten likeliest tokens. If none of them has this text, the
    member's tokenizer encodes it. If the encoding has several tokens, the text has probability zero
    for this member. The text with the highest average is committed.

    With a threshold, one member is the gate. If the probability of its likeliest token is above the
    threshold, the gate decides alone. The other members read the committed text in their next pass.
    All members decide the first word of a reply to messages, because each one begins a reply in its
    own way.

    The score is -log of the weighted average. The NLL is -log of the member's probability, in nats.

    Cost: one pass per member for each committed token. If the gate decides alone, the cost is only
    one pass of the gate.

    Members list only their likeliest tokens, but the result is the same as with whole
    distributions. A text that no member lists has at most the average probability of the members'
    least likely listed tokens. While such a text could win, the members list more tokens. This
    costs no pass.

    Args:
        threshold: probability above which the gate decides alone. None turns the gate off. Any
            threshold but 0.5 is part of the name, as in ``gac-gated-0.7``.
        gate: name of the gate. Default: the first member that decodes.

    Raises:
        InvalidOptionError: the threshold is not a probability, or there is a gate but no threshold.
    """

    threshold: float | None = None
    gate: str | None = None

    options = frozenset({*GRAMMARS, "weights"})

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise InvalidOptionError(
                f"GaC(threshold=...) must be between 0 and 1, or None; got {self.threshold!r}"
            )
        if self.threshold is None and self.gate is not None:
            raise InvalidOptionError(
                f"GaC(gate={self.gate!r}) has no effect without a threshold. Set a "
                "threshold, such as threshold=0.5."
            )

    @property
    @override
    def name(self) -> str:
        if self.threshold is None:
            return "gac"
        setting = "" if self.threshold == GATED_THRESHOLD else f"-{self.threshold:g}"
        return f"gac-gated{setting}"

    @override
    def check(self, members: Sequence[Backend]) -> None:
        names = [member.name for member in members]
        if self.gate is not None and self.gate not in names:
            raise InvalidInputError(
                f"GaC(gate=...) must be one of the members that decode ({', '.join(names)}); "
                f"got {self.gate!r}"
            )
        check_whole(self.name, members)

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return LISTED

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        members = context.members
        gates = [member for member in members if member.name == self.gate]
        return partial(self._play, members, (gates or members)[0])

    def _play(self, members: Sequence[Member], gate: Member) -> Steps[RoundOutcome]:
        opening = gate.opening
        if self.threshold is not None and not opening.is_reply:
            offered = yield from offer(gate, 1)
            likeliest = gate.next(gate.tree.root)
            if math.exp(likeliest.logprobs[0] - likeliest.mass) > self.threshold:
                return self._alone(members, gate, offered)
        proposals = yield from in_lockstep([offer(member, LISTED) for member in members])
        pool = union(members, proposals)
        if not opening.spaces and (gate.grammar is None or gate.grammar.may_end):
            pool.suggest("", stops=True)
        listed = LISTED
        while True:
            logprobs = yield from first_logprobs(members, pool, whole=True)
            scored = averaged(members, pool.candidates, logprobs)
            best = min((c.score for c in scored if c.score is not None), default=math.inf)
            if math.exp(-best) >= _unlisted(members, listed):
                break
            listed *= GROWTH
            yield from in_lockstep([suggest(member, pool, listed) for member in members])
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return choose_best(pool, scored, margins)

    def _alone(self, members: Sequence[Member], gate: Member, offered: Proposal) -> RoundOutcome:
        """Commit the gate's likeliest token to all members."""
        pool = union([gate], [offered])
        (candidate,) = pool.candidates
        for member in members:
            pool.encode(member, candidate)
        nll = 0.0 - gate.next(gate.tree.root).logprobs[0]
        scored = to_result(candidate, [gate], [nll], nll)
        margins = {m.name: offered.margins if m is gate else () for m in members}
        return choose_best(pool, [scored], margins)


def _unlisted(members: Sequence[Member], listed: int) -> float:
    """Return the highest average that a text can have if no member lists it.

    A member with fewer than `listed` tokens has listed its whole vocabulary.
    """
    bound = 0.0
    for member in members:
        logprobs = member.next(member.tree.root).logprobs
        if len(logprobs) >= listed:
            bound += member.weight * math.exp(logprobs[listed - 1] - member.mass(member.tree.root))
    return bound / math.fsum(member.weight for member in members)
