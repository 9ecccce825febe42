"""Choice of the best among the members' answers, by the members or by a trained ranker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.blocking import BlockingWork
from adafuse_llm.decoding.draft import NoDrafts
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, choose_best, play_round
from adafuse_llm.errors import DecodingError, InvalidOptionError
from adafuse_llm.strategies.base import StrategyContext
from adafuse_llm.strategies.rivals.token_level import union
from adafuse_llm.strategies.rivals.whole_answers import (
    WholeAnswers,
    answer,
    text_until_stop,
    to_result_by_proposers,
)


@runtime_checkable
class Ranker(Protocol):
    """Interface that compares answers.

    An engine calls a ranker on a thread that only this ranker has, one call at a time.
    """

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
    no effect.

    Cost: each member's own decoding. Without a ranker, each member also makes one pass over the
    other answers. With a ranker, the ranker makes one pass.

    Args:
        ranker: object that compares the answers. Without a ranker, the members score them.
    """

    name = "rerank"
    options = WholeAnswers.options | {"choices"}

    def __init__(self, ranker: Ranker | None = None) -> None:
        if ranker is not None and not isinstance(ranker, Ranker):
            raise InvalidOptionError(
                "Rerank(ranker=...) must be an object with a method compare, such as "
                f"PairRanker(folder); got {ranker!r}"
            )
        self.ranker = ranker
        if ranker is not None:
            self.name = "rerank-pairs"
            self.options = self.options - {"choices", "weights"}

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        if self.ranker is None:
            return partial(play_round, context.members, context.config, NoDrafts(), proposer=answer)
        return partial(self._play, self.ranker, context.members, context.config)

    def _play(
        self, ranker: Ranker, members: Sequence[Member], config: AdaFuseConfig
    ) -> Steps[RoundOutcome]:
        proposals = yield from in_lockstep([answer(member, config) for member in members])
        pool = union(members, proposals)
        texts = [text_until_stop(c.shown, config).strip() for c in pool.candidates]
        comparison = BlockingWork(
            f"ranker {type(ranker).__name__}",
            ranker,
            partial(_mean_logits, ranker, members[0].prompt_text, texts),
        )
        yield (comparison,)
        scores = comparison.result
        order = sorted(range(len(texts)), key=scores.__getitem__)
        scored = [
            to_result_by_proposers(pool.candidates[place], members, scores[place])
            for place in order
        ]
        pool.candidates = [pool.candidates[place] for place in order]
        for candidate in pool.candidates:
            for member in members:
                pool.encode(member, candidate)
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return choose_best(pool, scored, margins)


def _mean_logits(ranker: Ranker, question: str, answers: Sequence[str]) -> list[float]:
    """Return each answer's mean logit, over both orders, that the other answers are better.

    If there is only one answer, its value is 0.

    Raises:
        DecodingError: the ranker fails, or does not return a square matrix of finite numbers.
    """
    name = type(ranker).__name__
    places = range(len(answers))
    try:
        logits = [list(map(float, row)) for row in ranker.compare(question, answers)]
    except Exception as error:
        raise DecodingError(f"the ranker {name} failed: {type(error).__name__}: {error}") from error
    pairs = [(i, j) for i in places for j in places if i != j]
    if [len(row) for row in logits] != [len(answers)] * len(answers):
        sizes = ", ".join(str(len(row)) for row in logits)
        raise DecodingError(
            f"the ranker {name} must return {len(answers)} rows of {len(answers)} logits; got rows "
            f"of {sizes or 'nothing'}"
        )
    if not all(math.isfinite(logits[i][j]) for i, j in pairs):
        raise DecodingError(f"the ranker {name} returned logits that are NaN or infinite")
    return [
        math.fsum(logits[j][i] - logits[i][j] for j in places if j != i)
        / max(1, 2 * (len(answers) - 1))
        for i in places
    ]
