"""Strategies that choose among the members' whole answers: by a vote, or by likelihood."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from typing_extensions import override

from adafuse_llm import AdaFuseConfig
from adafuse_llm.strategies import (
    MemberState,
    NoDrafts,
    PlayRound,
    Proposal,
    RoundOutcome,
    Span,
    Steps,
    Strategy,
    StrategyContext,
    branch,
    choose_best,
    in_lockstep,
    play_round,
    to_result,
)
from benchmarks.peers.token_level import union


class WholeAnswers(Strategy):
    """Base of the strategies that choose among whole answers. A stream has one event."""

    options = frozenset({"max_word_letters", "max_word_tokens", "weights"})

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return members * (config.most_tokens() + config.max_word_tokens)


def answer(member: MemberState, config: AdaFuseConfig) -> Steps[Proposal]:
    """Propose a member's greedy answer, up to its end, a stop sequence, or a length limit."""
    end = member.tree.root
    margins: list[float] = []
    while True:
        text = member.shown(end)
        yield from member.evaluate([end])
        if member.room(end) <= 0 or member.is_full(end) or any(s in text for s in config.stop):
            return Proposal((Span(end, ends=False),), tuple(margins))
        margins.append(member.next(end).margin)
        (span,) = yield from branch(member, end, 1, config)
        if span.ends:
            return Proposal((span,), tuple(margins))
        end = span.node


class MajorityVote(WholeAnswers):
    """The answer whose members have the highest sum of weights.

    Every member writes its own answer greedily. Answers with the same key count as one answer, with
    the text of the earliest member. The earlier member's answer wins a tie. The score is the share
    of the votes for other answers. Only the members that proposed an answer have an NLL, which is
    the mean in nats per token. Cost: each member's own decoding.

    Args:
        key: function that returns the text by which answers are compared. Its argument is the
            answer up to the first stop sequence. Default: a function that ignores case and
            punctuation.
    """

    name = "vote"

    def __init__(self, key: Callable[[str], str] | None = None) -> None:
        self.key = key or _plain

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members, context.config)

    def _play(self, members: Sequence[MemberState], config: AdaFuseConfig) -> Steps[RoundOutcome]:
        proposals = yield from in_lockstep([answer(member, config) for member in members])
        pool, margins = union(members, proposals)
        keys = []
        for candidate in pool.candidates:
            for member in members:
                pool.encode(member, candidate)
            text = candidate.shown
            end = min((text.find(stop) for stop in config.stop if stop in text), default=None)
            keys.append(self.key(text[:end]))
        votes: defaultdict[str, float] = defaultdict(float)
        for key, candidate in zip(keys, pool.candidates, strict=True):
            votes[key] += math.fsum(member.weight for member in candidate.proposers)
        total = math.fsum(votes.values())
        scored = []
        for key, candidate in zip(keys, pool.candidates, strict=True):
            nll = [candidate.nll(m) if m in candidate.proposers else math.inf for m in members]
            scored.append(to_result(candidate, members, nll, 1.0 - votes[key] / total))
        return choose_best(pool, scored, margins)


def _plain(text: str) -> str:
    """Return the words of a text in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))


class Rerank(WholeAnswers):
    """The likeliest of the members' answers.

    Every member writes its own answer greedily, and reads the other members' answers in one pass.
    The score and the NLL are the same as in `AdaFuse`, for whole answers. The result has one round,
    whose pool holds each different answer once. An answer that a length limit cut off is a
    candidate, too.
    """

    name = "rerank"

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(play_round, context.members, context.config, NoDrafts(), proposer=answer)
