"""Majority vote over whole answers."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from typing_extensions import override

from adafuse_llm import AdaFuseConfig
from adafuse_llm.strategies import (
    Member,
    PlayRound,
    RoundOutcome,
    Steps,
    StrategyContext,
    choose_best,
    in_lockstep,
)
from benchmarks.peers.token_level import union
from benchmarks.peers.whole_answers import (
    WholeAnswers,
    answer,
    text_until_stop,
    to_result_by_proposers,
)


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

    def _play(self, members: Sequence[Member], config: AdaFuseConfig) -> Steps[RoundOutcome]:
        proposals = yield from in_lockstep([answer(member, config) for member in members])
        pool, margins = union(members, proposals)
        keys = [self.key(text_until_stop(each.shown, config)) for each in pool.candidates]
        votes: defaultdict[str, float] = defaultdict(float)
        for key, candidate in zip(keys, pool.candidates, strict=True):
            votes[key] += math.fsum(member.weight for member in candidate.proposers)
        total = math.fsum(votes.values())
        scored = [
            to_result_by_proposers(candidate, members, 1.0 - votes[key] / total)
            for key, candidate in zip(keys, pool.candidates, strict=True)
        ]
        for candidate in pool.candidates:
            for member in members:
                pool.encode(member, candidate)
        return choose_best(pool, scored, margins)


def _plain(text: str) -> str:
    """Return the words of a text in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))
