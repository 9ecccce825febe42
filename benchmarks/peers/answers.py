"""Strategies that choose among the members' whole answers: a vote, the members, or a ranker."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from typing_extensions import override

from adafuse_llm import AdaFuseConfig, Candidate
from adafuse_llm.strategies import (
    Member,
    NoDrafts,
    PlayRound,
    Pool,
    PoolCandidate,
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
from benchmarks.peers.token_level import Margins, union


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
            return Proposal((Span(end, ends=False),), tuple(margins))
        margins.append(member.next(end).margin)
        (span,) = yield from branch(member, end, 1, config)
        if span.ends:
            return Proposal((span,), tuple(margins))
        end = span.node


def own_answers(
    members: Sequence[Member], config: AdaFuseConfig
) -> Steps[tuple[Pool, Margins, list[str]]]:
    """Let every member answer alone.

    Returns:
        The different answers, the members' margins, and the answers up to their stop sequences.
    """
    proposals = yield from in_lockstep([answer(member, config) for member in members])
    pool, margins = union(members, proposals)
    for candidate in pool.candidates:
        for member in members:
            pool.encode(member, candidate)
    texts = [candidate.shown for candidate in pool.candidates]
    ends = [min((t.find(s) for s in config.stop if s in t), default=None) for t in texts]
    return pool, margins, [text[:end] for text, end in zip(texts, ends, strict=True)]


def to_result_by_proposers(
    candidate: PoolCandidate, members: Sequence[Member], score: float
) -> Candidate:
    """Return a candidate with the NLLs of its proposers. No other member has read it."""
    own = [candidate.nll(m) if m in candidate.proposers else math.inf for m in members]
    return to_result(candidate, members, own, score)


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
        pool, margins, texts = yield from own_answers(members, config)
        keys = [self.key(text) for text in texts]
        votes: defaultdict[str, float] = defaultdict(float)
        for key, candidate in zip(keys, pool.candidates, strict=True):
            votes[key] += math.fsum(member.weight for member in candidate.proposers)
        total = math.fsum(votes.values())
        scored = [
            to_result_by_proposers(candidate, members, 1.0 - votes[key] / total)
            for key, candidate in zip(keys, pool.candidates, strict=True)
        ]
        return choose_best(pool, scored, margins)


def _plain(text: str) -> str:
    """Return the words of a text in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))


class Ranker(Protocol):
    """Interface that compares answers."""

    def compare(self, question: str, answers: Sequence[str]) -> Sequence[Sequence[float]]:
        """Return a matrix with one row and one column per answer.

        Row i, column j holds the logit that answer i is better than answer j if the ranker reads
        answer i first. The diagonal is ignored.
        """
        ...


class Rerank(WholeAnswers):
    """The best of the members' answers: the likeliest one, or the one that a ranker prefers.

    Every member writes its own answer greedily. The result has one round, whose pool holds each
    different answer once. An answer that a length limit cut off is a candidate, too.

    Without a ranker, each member reads the other members' answers in one pass. The score and the
    NLL are the same as in `AdaFuse`, for whole answers.

    With a ranker, such as `PairRanker`, every answer is compared with every other answer in both
    orders. The score of an answer is the mean logit that the other answers are better. Only the
    members that proposed an answer have an NLL, which is the mean in nats per token. Weights have
    no effect. Other requests wait while the ranker works.

    Args:
        ranker: object that compares the answers. Without a ranker, the members score them.
    """

    name = "rerank"

    def __init__(self, ranker: Ranker | None = None) -> None:
        self.ranker = ranker
        if ranker is not None:
            self.name = "rerank-pairs"
            self.options = self.options - {"weights"}

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        if self.ranker is None:
            return partial(play_round, context.members, context.config, NoDrafts(), proposer=answer)
        return partial(self._play, self.ranker, context.members, context.config)

    def _play(
        self, ranker: Ranker, members: Sequence[Member], config: AdaFuseConfig
    ) -> Steps[RoundOutcome]:
        pool, margins, texts = yield from own_answers(members, config)
        texts = [text.strip() for text in texts]
        scores = _mean_logits(ranker.compare(members[0].prompt_text, texts))
        order = sorted(range(len(texts)), key=scores.__getitem__)
        pool.candidates[:] = [pool.candidates[place] for place in order]
        scored = [
            to_result_by_proposers(candidate, members, scores[place])
            for candidate, place in zip(pool.candidates, order, strict=True)
        ]
        return choose_best(pool, scored, margins)


def _mean_logits(logits: Sequence[Sequence[float]]) -> list[float]:
    """Return each answer's mean logit, over both orders, that the other answers are better.

    If there is only one answer, its value is 0.
    """
    places = range(len(logits))
    return [
        math.fsum(logits[j][i] - logits[i][j] for j in places if j != i)
        / max(1, 2 * (len(logits) - 1))
        for i in places
    ]
