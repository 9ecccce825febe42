"""Whole-answer fusion: every member answers alone, then one answer is taken."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from typing_extensions import override

from adafuse_llm import results
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.draft import NoDrafts
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal, Span, branch
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, commit_best, play_round, to_result
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.errors import DecodingError, InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.strategies.tokens import union


class _WholeAnswers(Strategy):
    """What strategies share that choose among whole answers. A stream of them has one event."""

    options = frozenset({"max_word_tokens", "weights"})

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return members * (config.max_new_tokens + config.max_word_tokens)


@runtime_checkable
class Ranker(Protocol):
    """Compares answers. Called on the thread that all requests of an engine run on."""

    def compare(self, question: str, answers: Sequence[str]) -> Sequence[Sequence[float]]:
        """In row i and column j the logit that answer i is better than answer j, if i is read
        first; what stands where i is j does not matter.
        """
        ...


class Rerank(_WholeAnswers):
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
        texts = [_until_stop(each.text, config).strip() for each in pool.candidates]
        scores = _compared(ranker, members[0].prompt_text, texts)
        order = sorted(range(len(texts)), key=scores.__getitem__)
        scored = [
            _to_result_by_proposers(pool.candidates[place], members, scores[place])
            for place in order
        ]
        pool.candidates = [pool.candidates[place] for place in order]
        for candidate in pool.candidates:
            for member in members:
                pool.place(member, candidate)
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return commit_best(pool, scored, margins)


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
            scored.append(_to_result_by_proposers(candidate, members, 1.0 - share))
            for member in members:
                pool.place(member, candidate)
        margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
        return commit_best(pool, scored, margins)

    def _key(self, text: str, config: AdaFuseConfig) -> str:
        return self.key(_until_stop(text, config))


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


def _until_stop(text: str, config: AdaFuseConfig) -> str:
    return text[: min((text.find(stop) for stop in config.stop if stop in text), default=None)]


def _to_result_by_proposers(
    candidate: PoolCandidate, members: Sequence[Member], score: float
) -> results.Candidate:
    """A candidate with the NLL of those who gave it alone: nobody else has read it."""
    own = [candidate.nll(m) if m in candidate.proposers else math.inf for m in members]
    return to_result(candidate, members, own, score)


class _Answers(NoDrafts):
    """Every member proposes its whole answer."""

    @override
    def propose(self, config: AdaFuseConfig, *, first_word: bool) -> Steps[list[Proposal]]:
        return in_lockstep([answer(member, config) for member in self._members])


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
