"""GaC: the average of the distributions over the union of the vocabularies."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adafuse_llm import AdaFuseConfig, InvalidInputError
from adafuse_llm.backends import Backend, Query, is_allowed
from adafuse_llm.strategies import (
    MemberState,
    PlayRound,
    Pool,
    Proposal,
    RoundOutcome,
    Steps,
    Strategy,
    StrategyContext,
    choose_best,
    in_lockstep,
    to_result,
)
from benchmarks.peers.token_level import (
    LISTED,
    UNFINISHED,
    averaged,
    first_logprobs,
    offer,
    union,
)

GROWTH = 4
"""Factor by which the number of candidates grows while the choice is not certain."""


@dataclass(frozen=True)
class GaC(Strategy):
    """The average of the members' distributions over the union of their vocabularies
    (arXiv 2406.12585).

    A member looks for a text among its ten likeliest tokens. If none of them has this text, the
    member's tokenizer encodes it. If the encoding has several tokens, the text has probability zero
    for this member. The text with the highest average is committed.

    With a threshold, the first member is the gate. If the probability of its likeliest token is
    above the threshold, the gate decides alone. The other members read the committed text in their
    next pass. All members decide the first word of a reply to messages, because each one begins a
    reply in its own way.

    The score is -log of the weighted average. The NLL is -log of the member's probability, in nats.

    Cost: one pass per member for each committed token. If the gate decides alone, the cost is only
    one pass of the gate.

    Only the members' likeliest tokens are candidates, but the result is that of all tokens. A text
    that is not a candidate has at most the average probability of the least likely ones. While such
    a text could win, there are more candidates. This costs no pass.

    Args:
        threshold: probability above which the gate decides alone. None turns the gate off.
    """

    threshold: float | None = None

    options = frozenset({"weights"})

    @property
    @override
    def name(self) -> str:
        if self.threshold is None:
            return "gac"
        return "gac-gated" if self.threshold == 0.5 else f"gac-gated-{self.threshold:g}"

    @override
    def check(self, members: Sequence[Backend]) -> None:
        check_distributions(self.name, members)

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return LISTED

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members)

    def _play(self, members: Sequence[MemberState]) -> Steps[RoundOutcome]:
        gate, opening = members[0], members[0].opening
        if self.threshold is not None and not opening.is_reply:
            offered = yield from offer(gate, 1)
            likeliest = gate.next(gate.tree.root)
            if math.exp(likeliest.logprobs[0] - likeliest.mass) > self.threshold:
                return self._alone(members, gate, offered)
        proposals = yield from in_lockstep([offer(member, LISTED) for member in members])
        pool, margins = union(members, proposals)
        if not opening.spaces:
            pool.suggest("", ends=True)
        listed, ordered = LISTED, [_Ordered(member) for member in members]
        while True:
            logprobs = yield from first_logprobs(members, pool, whole=True)
            scored = averaged(members, pool.candidates, logprobs)
            best = min((c.score for c in scored if c.score is not None), default=math.inf)
            missing = [m.weight * o.at(listed) for m, o in zip(members, ordered, strict=True)]
            if math.exp(-best) >= math.fsum(missing) / math.fsum(m.weight for m in members):
                return choose_best(pool, scored, margins)
            for each in ordered:
                each.suggest(pool, listed, GROWTH * listed)
            listed *= GROWTH

    def _alone(
        self, members: Sequence[MemberState], gate: MemberState, offered: Proposal
    ) -> RoundOutcome:
        """Commit the gate's likeliest token to all members."""
        pool, _ = union([gate], [offered])
        (candidate,) = pool.candidates
        for member in members:
            pool.encode(member, candidate)
        nll = 0.0 - gate.next(gate.tree.root).logprobs[0]
        scored = to_result(candidate, [gate], [nll], nll)
        margins = {m.name: offered.margins if m is gate else () for m in members}
        return choose_best(pool, [scored], margins)


class _Ordered:
    """A member's next tokens that may follow, the likeliest first."""

    def __init__(self, member: MemberState) -> None:
        self._member, root = member, member.tree.root
        self._logprobs = distribution(member)
        order = np.argsort(-self._logprobs, kind="stable")
        self._tokens = [
            int(token) for token in order if root.allowed is None or is_allowed(root.allowed, token)
        ]

    def at(self, count: int) -> float:
        """Return the probability of the token at a place, from 1, or 0 beyond the last token."""
        if count > len(self._tokens):
            return 0.0
        return math.exp(self._logprobs[self._tokens[count - 1]])

    def suggest(self, pool: Pool, start: int, end: int) -> None:
        """Add the texts of the tokens from one place to another, if they are whole characters."""
        member = self._member
        for token in self._tokens[start:end]:
            text = member.text(member.tree.child(member.tree.root, token))
            if token not in member.end_ids and not text.endswith(UNFINISHED):
                pool.suggest(text, ends=False)


def distribution(member: MemberState) -> NDArray[np.floating]:
    """Return the log-probabilities of all next tokens of a member, whose root is evaluated."""
    root = member.tree.root
    allowed, root.allowed = root.allowed, None
    query = Query(member.tree, evaluate=(root,), score=(), top=sys.maxsize)
    (listed,) = member.backend.evaluate([query])[0].next
    root.allowed = allowed
    whole = np.full(max(listed.tokens) + 1, -np.inf)
    whole[list(listed.tokens)] = listed.logprobs
    return whole


def check_distributions(strategy: str, members: Sequence[Backend]) -> None:
    """Check that members know whole distributions.

    Raises:
        InvalidInputError: a member does not.
    """
    if lacking := [m.name for m in members if not m.knows_distributions]:
        raise InvalidInputError(
            f"strategy {strategy!r} needs whole distributions, and {', '.join(lacking)} list only "
            "the likeliest tokens. Leave them out with use=[...]."
        )
