"""The best of the members' answers, as the members or a trained ranker judge them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.draft import NoDrafts
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, commit_best, play_round
from adafuse_llm.errors import DecodingError, InvalidOptionError
from adafuse_llm.strategies.base import StrategyContext
from adafuse_llm.strategies.token_level import union
from adafuse_llm.strategies.whole_answers import (
    WholeAnswers,
    answer,
    text_until_stop,
    to_result_by_proposers,
)


@runtime_checkable
class Ranker(Protocol):
    """Compares answers. Called on the thread that all requests of an engine run on."""

    def compare(self, question: str, answers: Sequence[str]) -> Sequence[Sequence[float]]:
        """In row i and column j the logit that answer i is better than answer j, if i is read
        first; what stands where i is j does not matter.
        """
        ...


class Rerank(WholeAnswers):
    """The best of the members' answers: the likeliest, or what a trained ranker prefers.

    Every member answers greedily and alone; the pool of the only round holds the answers, each
    text once. An answer that was cut off by a length limit competes as it is.

    Without a ranker the members read each other's answers, in one pass. Score and NLL: AdaFuse's,
    over whole answers.

    With a ranker, such as `PairRanker`, every answer is compared with every other one in both
    orders. Score: the mean logit that the others are better. NLL: of those who gave the answer,
    mean nats per token. Weights do not count.

    Cost: each member's own decoding, and a pass over the others' answers or the ranker's pass.

    Args:
        ranker: compares answers; None for none.
    """

    name = "rerank"

    def __init__(self, ranker: Ranker | None = None) -> None:
        if ranker is not None and not isinstance(ranker, Ranker):
            raise InvalidOptionError(
                "Rerank(ranker=...) must have a method compare, as PairRanker(folder) has; "
                f"got {ranker!r}"
            )
        self.ranker = ranker
        if ranker is not None:
            self.name = "rerank-pairs"
            self.options = self.options - {"weights"}

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        if self.ranker is None:
            return partial(play_round, context.members, context.config, _Answers(context.members))
        return partial(self._play, self.ranker, context.members, context.config)

    def _play(
        self, ranker: Ranker, members: Sequence[Member], config: AdaFuseConfig, first_word: bool
    ) -> Steps[RoundOutcome]:
        proposals = yield from in_lockstep([answer(member, config) for member in members])
        pool = union(members, proposals, first_word=first_word)
        texts = [text_until_stop(each.text, config).strip() for each in pool.candidates]
        scores = _compared(ranker, members[0].prompt_text, texts)
        order = sorted(range(len(texts)), key=scores.__getitem__)
        scored = [
            to_result_by_proposers(pool.candidates[place], members, scores[place])
            for place in order
        ]
        pool.candidates = [pool.candidates[place] for place in order]
        for candidate in pool.candidates:
            for member in members:
                pool.place(member, candidate)
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return commit_best(pool, scored, margins)


def _compared(ranker: Ranker, question: str, answers: Sequence[str]) -> list[float]:
    """For each answer the mean logit that the others are better, in both orders; 0 for a lone one.

    Raises:
        DecodingError: the ranker failed, or what it returned is no square matrix of finite numbers.
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


class _Answers(NoDrafts):
    """Every member proposes its whole answer."""

    @override
    def propose(self, config: AdaFuseConfig, *, first_word: bool) -> Steps[list[Proposal]]:
        return in_lockstep([answer(member, config) for member in self._members])
