"""Choice of the best among the members' answers, by the members or by a trained ranker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from typing_extensions import override

from adafuse_llm import AdaFuseConfig
from adafuse_llm.strategies import (
    Member,
    NoDrafts,
    PlayRound,
    RoundOutcome,
    Steps,
    StrategyContext,
    choose_best,
    in_lockstep,
    play_round,
)
from benchmarks.peers.token_level import union
from benchmarks.peers.whole_answers import (
    WholeAnswers,
    answer,
    text_until_stop,
    to_result_by_proposers,
)


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
        proposals = yield from in_lockstep([answer(member, config) for member in members])
        pool, margins = union(members, proposals)
        texts = [text_until_stop(c.shown, config).strip() for c in pool.candidates]
        scores = _mean_logits(ranker.compare(members[0].prompt_text, texts))
        order = sorted(range(len(texts)), key=scores.__getitem__)
        pool.candidates[:] = [pool.candidates[place] for place in order]
        scored = [
            to_result_by_proposers(candidate, members, scores[place])
            for candidate, place in zip(pool.candidates, order, strict=True)
        ]
        for candidate in pool.candidates:
            for member in members:
                pool.encode(member, candidate)
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
