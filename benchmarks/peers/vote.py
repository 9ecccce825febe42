"""Majority vote over whole answers."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, choose_best
from adafuse_llm.decoding.score import Pool
from adafuse_llm.strategies.base import StrategyContext
from adafuse_llm.strategies.rivals.whole_answers import (
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
    the mean in nats per token.

    Cost: each member's own decoding.

    Args:
        key: function that returns the text by which answers are compared. Its argument is the
            answer up to the first stop sequence. Default: a function that ignores case and
            punctuation.
    """

    name = "vote"

    def __init__(self, key: Callable[[str], str] | None = None) -> None:
        self.key = key or plain

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members, context.config)

    def _play(self, members: Sequence[Member], config: AdaFuseConfig) -> Steps[RoundOutcome]:
        proposals = yield from in_lockstep([answer(member, config) for member in members])
        pool = Pool(members[0].opening)
        votes: defaultdict[str, float] = defaultdict(float)
        for member, proposal in zip(members, proposals, strict=True):
            candidate = pool.add(member, proposal)
            votes[self._key(candidate.shown, config)] += member.weight
        scored = []
        for candidate in pool.candidates:
            share = votes[self._key(candidate.shown, config)] / math.fsum(votes.values())
            scored.append(to_result_by_proposers(candidate, members, 1.0 - share))
            for member in members:
                pool.encode(member, candidate)
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return choose_best(pool, scored, margins)

    def _key(self, text: str, config: AdaFuseConfig) -> str:
        return self.key(text_until_stop(text, config))


def plain(text: str) -> str:
    """Return the words of a text in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))
