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
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, commit_best
from adafuse_llm.decoding.score import Pool
from adafuse_llm.strategies.base import StrategyContext
from adafuse_llm.strategies.whole_answers import (
    WholeAnswers,
    answer,
    text_until_stop,
    to_result_by_proposers,
)


class MajorityVote(WholeAnswers):
    """The answer with the highest sum of its members' weights.

    Every member answers greedily and alone. Answers with equal keys are the same answer, and the
    text of the earliest member is used. The earlier member's answer wins a tie. The score is the
    share of the votes for other answers. The NLL of a member is its mean in nats per token, and
    only the answer's proposers have one.

    Cost: each member's own decoding.

    Args:
        key: returns the text by which answers are compared. Its argument is the answer up to the
            first stop sequence. Default: the words without case and punctuation.
    """

    name = "vote"

    def __init__(self, key: Callable[[str], str] | None = None) -> None:
        self.key = key or plain

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members, context.config)

    def _play(
        self, members: Sequence[Member], config: AdaFuseConfig, first_word: bool
    ) -> Steps[RoundOutcome]:
        proposals = yield from in_lockstep([answer(member, config) for member in members])
        pool = Pool(first_word=first_word)
        votes: defaultdict[str, float] = defaultdict(float)
        for member, proposal in zip(members, proposals, strict=True):
            candidate = pool.add(member, proposal)
            votes[self._key(candidate.text, config)] += member.weight
        scored = []
        for candidate in pool.candidates:
            share = votes[self._key(candidate.text, config)] / math.fsum(votes.values())
            scored.append(to_result_by_proposers(candidate, members, 1.0 - share))
            for member in members:
                pool.place(member, candidate)
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return commit_best(pool, scored, margins)

    def _key(self, text: str, config: AdaFuseConfig) -> str:
        return self.key(text_until_stop(text, config))


def plain(text: str) -> str:
    """Return the words of a text, without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))
