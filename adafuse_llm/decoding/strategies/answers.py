"""Whole-answer fusion: every member answers alone, then one answer is taken."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig, RuntimeConfig
from adafuse_llm.decoding.draft import NoDrafts
from adafuse_llm.decoding.member import Member, Steps, together
from adafuse_llm.decoding.propose import Proposal, Span, branch
from adafuse_llm.decoding.rounds import judged, play_round, settle
from adafuse_llm.decoding.score import Pool
from adafuse_llm.decoding.strategy import Outcome, Play, Strategy


class _WholeAnswers(Strategy):
    """What strategies share that choose among whole answers. A stream of them has one event."""

    options = frozenset({"max_word_tokens", "weights"})

    @override
    def spare(self, members: int, config: AdaFuseConfig) -> int:
        return members * (config.max_new_tokens + config.max_word_tokens)


class Rerank(_WholeAnswers):
    """The answer that the members find likeliest, without a trained ranker.

    Every member answers greedily and alone, then reads the others' answers in one pass. The pool
    of the only round holds the answers. Score and NLL: AdaFuse's, over whole answers; an answer
    that was cut off by a length limit competes as it is.

    Cost: each member's own decoding, and a pass over the others' answers.
    """

    name = "rerank"

    @override
    def begin(
        self,
        members: Sequence[Member],
        config: AdaFuseConfig,
        runtime: RuntimeConfig,
        crowded: Callable[[], bool],
    ) -> Play:
        return partial(play_round, members, config, _Answers(members))


class MajorityVote(_WholeAnswers):
    """The answer that most members give, by weight; of equal ones the earlier member's.

    Every member answers greedily and alone. Answers count as the same where their `key` is; the
    text of the earliest is taken. Score: the share of the votes for other answers. NLL: of those
    who gave the answer, mean nats per token.

    Cost: each member's own decoding.

    Args:
        key: what of an answer is compared; default: its words without case and punctuation. The
            answer is given up to the first stop sequence.
    """

    name = "vote"

    def __init__(self, key: Callable[[str], str] | None = None) -> None:
        self.key = key or plain

    @override
    def begin(
        self,
        members: Sequence[Member],
        config: AdaFuseConfig,
        runtime: RuntimeConfig,
        crowded: Callable[[], bool],
    ) -> Play:
        return partial(self._play, members, config)

    def _play(
        self, members: Sequence[Member], config: AdaFuseConfig, first_word: bool
    ) -> Steps[Outcome]:
        started = time.perf_counter()
        proposals = yield from together([answer(member, config) for member in members])
        pool = Pool(first_word=first_word)
        votes: defaultdict[str, float] = defaultdict(float)
        for member, proposal in zip(members, proposals, strict=True):
            candidate = pool.add(member, proposal)
            votes[self._key(candidate.text, config)] += member.weight
        scored = []
        for candidate in pool.candidates:
            own = [m if m in candidate.proposers else None for m in members]
            nll = [math.inf if m is None else candidate.nll(m) for m in own]
            share = votes[self._key(candidate.text, config)] / math.fsum(votes.values())
            scored.append(judged(candidate, members, nll, 1.0 - share))
            for member in members:
                pool.place(member, candidate)
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return settle(pool, scored, margins, started)

    def _key(self, text: str, config: AdaFuseConfig) -> str:
        return self.key(text[: min((text.find(s) for s in config.stop if s in text), default=None)])


class _Answers(NoDrafts):
    """Every member proposes its whole answer."""

    @override
    def propose(self, config: AdaFuseConfig, *, first_word: bool) -> Steps[list[Proposal]]:
        return together([answer(member, config) for member in self._members])


def answer(member: Member, config: AdaFuseConfig) -> Steps[Proposal]:
    """A member's greedy answer, up to its end, a stop sequence, or a limit."""
    end = start = member.tree.root
    limit = start.length + config.max_new_tokens - member.response_tokens
    margins: list[float] = []
    while True:
        text = member.text(end)
        yield from member.evaluate([end])
        if end.length >= limit or member.is_full(end) or any(s in text for s in config.stop):
            return Proposal((Span(end, stops=False),), tuple(margins))
        margins.append(member.next(end).margin)
        (span,) = yield from branch(member, end, 1, config)
        if span.stops:
            return Proposal((span,), tuple(margins))
        end = span.node


def plain(text: str) -> str:
    """The words of a text, without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))
