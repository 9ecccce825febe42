"""Common parts of the strategies that choose among whole answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from typing_extensions import override

from adafuse_llm import AdaFuseConfig, Candidate
from adafuse_llm.strategies import (
    Member,
    PoolCandidate,
    Proposal,
    Span,
    Steps,
    Strategy,
    branch,
    to_result,
)


class WholeAnswers(Strategy):
    """Base of the strategies that choose among whole answers. A stream has one event."""

    options = frozenset({"max_word_letters", "max_word_tokens", "weights"})

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return members * (config.max_new_tokens + config.max_word_tokens)


def answer(member: Member, config: AdaFuseConfig) -> Steps[Proposal]:
    """Propose a member's greedy answer, up to its end, a stop sequence, or a length limit."""
    end = member.tree.root
    margins: list[float] = []
    while True:
        text = member.shown(end)
        yield from member.evaluate([end])
        if member.room(end) <= 0 or member.is_full(end) or any(s in text for s in config.stop):
            return Proposal((Span(end, stops=False),), tuple(margins))
        margins.append(member.next(end).margin)
        (span,) = yield from branch(member, end, 1, config)
        if span.stops:
            return Proposal((span,), tuple(margins))
        end = span.node


def text_until_stop(text: str, config: AdaFuseConfig) -> str:
    """Return a text up to its first stop sequence."""
    return text[: min((text.find(stop) for stop in config.stop if stop in text), default=None)]


def to_result_by_proposers(
    candidate: PoolCandidate, members: Sequence[Member], score: float
) -> Candidate:
    """Return a candidate with the NLLs of its proposers. No other member has read it."""
    own = [candidate.nll(m) if m in candidate.proposers else math.inf for m in members]
    return to_result(candidate, members, own, score)
