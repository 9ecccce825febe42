"""AdaFuse that scores each candidate together with the words that may follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from typing_extensions import override

from adafuse_llm import results
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep, merge_queries
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal, Span, branch
from adafuse_llm.decoding.rounds import PlayRound, play_round, score
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.strategies.adafuse import OF_ROUNDS, branch_tokens
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.tree import Node

DEFAULT_WORDS: Final = 4
"""Default number of words of a continuation."""

WITHIN: Final = 1.0
"""Largest difference to the lowest F of a round, in nats per token, of a candidate that is
continued."""


@dataclass(frozen=True)
class LookAhead(Strategy):
    """AdaFuse that scores each candidate together with the words that may follow it.

    This strategy is this project's own, and is not in the paper. A round has the candidates of
    `AdaFuse`. Each member continues each candidate by up to `words` greedy words, or until the
    response ends. F of a candidate is then the lowest F of its continuations, including the words
    of the candidate. Only the candidate is committed. A candidate that ends the response keeps its
    own F. Candidates whose own F is more than `WITHIN` above the lowest are not continued. They
    cannot win, and their score is None. A round with one candidate is that of `AdaFuse`.

    The NLL of a candidate is that of its best continuation, in nats per token.

    Cost: each member also processes the continuations of all members.

    Args:
        words: largest number of words of a continuation.

    Raises:
        InvalidOptionError: `words` is not a whole number, or is less than one.
    """

    words: int = DEFAULT_WORDS

    options = frozenset({"choices", *OF_ROUNDS})

    def __post_init__(self) -> None:
        if not isinstance(self.words, int) or self.words < 1:
            raise InvalidOptionError(
                f"LookAhead(words=...) must be a whole number of at least 1; got {self.words!r}"
            )

    @property
    @override
    def name(self) -> str:
        return f"look-ahead-{self.words}"

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, config.branches)

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        continuations = members * config.branches * members
        words = continuations * (config.max_words + self.words)
        return branch_tokens(members, config) + words * config.max_word_tokens

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        rescore = partial(self._rescore, context.members, context.config)
        return partial(
            play_round, context.members, context.config, context.drafting, rescore=rescore
        )

    def _rescore(
        self,
        members: Sequence[Member],
        config: AdaFuseConfig,
        pool: Pool,
        scored: Sequence[results.Candidate],
    ) -> Steps[list[results.Candidate]]:
        """Give each candidate the score and the NLLs of its best continuation."""
        fused = [each.score for each in scored if each.score is not None]
        if len(scored) == 1 or not fused:
            return list(scored)
        close = [each.score is not None and each.score <= min(fused) + WITHIN for each in scored]
        going = [
            candidate
            for candidate, is_close in zip(pool.candidates, close, strict=True)
            if is_close and not candidate.stops
        ]
        continued = yield from self._continue(going, members, config)
        return [
            _best(own, continued.get(candidate, ()))
            if is_close
            else own.model_copy(update={"score": None})
            for candidate, own, is_close in zip(pool.candidates, scored, close, strict=True)
        ]

    def _continue(
        self, candidates: Sequence[PoolCandidate], members: Sequence[Member], config: AdaFuseConfig
    ) -> Steps[Mapping[PoolCandidate, list[results.Candidate]]]:
        """Let each member continue each candidate that it can score, and score the continuations.

        Returns:
            The continuations of each candidate, each with the candidate's words.
        """
        able = {m: [each for each in candidates if m in each.exact] for m in members}
        spans = yield from in_lockstep(
            [
                merge_queries(m, [self._extend(m, each.ends[m], config) for each in own])
                for m, own in able.items()
            ]
        )
        pool = Pool(members[0].opening)
        for member, found in zip(able, spans, strict=True):
            if found:
                pool.add(member, Proposal(tuple(found), ()))
        yield from in_lockstep([pool.read(member, lambda _: False) for member in members])
        scored = {each: score(each, members) for each in pool.candidates}
        continued: dict[PoolCandidate, list[results.Candidate]] = {}
        for (member, own), found in zip(able.items(), spans, strict=True):
            for candidate, span in zip(own, found, strict=True):
                longer = scored[pool.candidate_of(member, span)]
                continued.setdefault(candidate, []).append(longer)
        return continued

    def _extend(self, member: Member, end: Node, config: AdaFuseConfig) -> Steps[Span]:
        """Return the span that continues a node by the member's greedy words."""
        span = Span(end, stops=False)
        for _ in range(self.words):
            if span.stops or member.is_full(span.node):
                break
            yield from member.evaluate([span.node])
            (span,) = yield from branch(member, span.node, 1, config)
        return span


def _best(own: results.Candidate, continued: Sequence[results.Candidate]) -> results.Candidate:
    """Return a candidate with the score and the NLLs of its best continuation, if it has one."""
    known = [(each.score, place) for place, each in enumerate(continued) if each.score is not None]
    if not known:
        return own
    best = continued[min(known)[1]]
    return own.model_copy(update={"score": best.score, "nll": best.nll})
