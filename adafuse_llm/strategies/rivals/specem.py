"""SpecEM: segments that all members propose and score, with weights from online feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm import results
from adafuse_llm.config import GRAMMARS, SAMPLING, AdaFuseConfig
from adafuse_llm.decoding.draft import NoDrafts
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal, Span
from adafuse_llm.decoding.rounds import PlayRound, play_round
from adafuse_llm.decoding.score import Pool
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.text.words import CHARACTER_TOKENS, is_incomplete
from adafuse_llm.tree import Node


@dataclass(frozen=True)
class SpecEM(Strategy):
    """Segments of several tokens that all members propose and score (arXiv 2412.07380v3).

    Every member proposes a segment of at most `tokens` tokens. If the segment ends in an ASCII
    letter or digit, it is cut back to its last whitespace. Then every member reads all segments.
    The share s(j, i) that member j gives to the segment of member i is exp(-NLL), where the NLL is
    the mean in nats per token, divided by its sum over the members' segments.

    In the feedback after the scores of round t, member i gets the reward r(i). This is the share of
    all pairs of another member j and another segment k for which s(j, i) is at least s(j, k). One
    pair always counts. The weight of member i is multiplied by exp(rate · sqrt(1/K) / t · r(i)),
    where K is the number of members, and the weights are divided by their sum. They begin with the
    option `weights` and are kept for one response. The segment with the highest weighted sum of
    shares is committed. The score is -log of this sum.

    Cost: each member makes one pass per token of its own segment, and one pass per round over the
    segments of the others.

    Departures from the paper and the authors' code: segments are greedy unless the option
    `temperature` is set, so a response is deterministic. The code scores by raw logits, which have
    no common zero, so shares of negative logits reverse the order; here, logits become
    probabilities by a softmax first. The code cuts a finished answer, too, which loses its last
    word; here, a segment that ends the response is never cut. The code cuts the last letter of a
    long first word; here, a segment without whitespace between two words stays whole. The code
    never scores the end of the response; here, it is a term of the NLL. The code drops whitespace
    at the end of a segment; here, it stays. The paper's rate is not known, and the code turns the
    feedback off by default.

    Args:
        tokens: maximum number of tokens of a segment, without those that complete its last
            character.
        rate: learning rate of the feedback, a tenth of the code's `learn_rate`. 0 keeps the weights
            as they are.

    Raises:
        InvalidOptionError: `tokens` is less than one, or `rate` is negative or not finite.
    """

    tokens: int = 10
    rate: float = 1.0

    name = "specem"
    options = frozenset({*GRAMMARS, *SAMPLING, "weights"})

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidOptionError(f"SpecEM(tokens=...) must be 1 or more; got {self.tokens!r}")
        if not 0 <= self.rate < math.inf:
            raise InvalidOptionError(f"SpecEM(rate=...) must be 0 or more; got {self.rate!r}")

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return members * (self.tokens + CHARACTER_TOKENS)

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        members = context.members
        return partial(
            play_round,
            members,
            context.config,
            NoDrafts(),
            rescore=_Feedback(members, self.rate).rescore,
            proposer=partial(_segment, tokens=self.tokens),
        )


def _segment(member: Member, _: AdaFuseConfig, tokens: int) -> Steps[Proposal]:
    """Propose a segment of at most `tokens` tokens."""
    end = root = member.tree.root
    margins: list[float] = []
    while not member.is_full(end):
        size = end.length - root.length
        limit = tokens + CHARACTER_TOKENS * is_incomplete(member.text(end))
        if size >= limit:
            break
        yield from member.evaluate([end])
        margins.append(member.next(end).margin)
        token = member.next(end).chosen
        if token in member.end_ids:
            return Proposal((Span(end, stops=True),), tuple(margins))
        end = member.tree.child(end, token)
    return Proposal((Span(_cut(member, end), stops=False),), tuple(margins))


def _cut(member: Member, end: Node) -> Node:
    """Return the last node of a segment that is not inside a word, or else its last node."""
    text = member.text(end)
    if not (text[-1:].isascii() and text[-1:].isalnum()):
        return end
    for node in reversed(member.tree.path(end)[:-1]):
        kept = member.text(node)
        around = kept[-1:] + text[len(kept) : len(kept) + 1]
        if text.startswith(kept) and kept.strip() and around != around.strip():
            return node
    return end


class _Feedback:
    """The members' weights in one response."""

    def __init__(self, members: Sequence[Member], rate: float) -> None:
        self._members = members
        self._rate = rate
        self._rounds = 0
        total = math.fsum(member.weight for member in members)
        self._weights = [member.weight / total for member in members]

    def rescore(
        self, pool: Pool, scored: Sequence[results.Candidate]
    ) -> Steps[list[results.Candidate]]:
        """Change the weights, and score the candidates with them."""
        yield from ()
        members = self._members
        likely = [
            [math.exp(-candidate.nll(member)) for candidate in pool.candidates]
            for member in members
        ]
        own = [
            next(place for place, each in enumerate(pool.candidates) if member in each.proposers)
            for member in members
        ]
        totals = [math.fsum(row[place] for place in own) for row in likely]
        shares = [
            [each / total if total > 0 else 0.0 for each in row]
            for row, total in zip(likely, totals, strict=True)
        ]
        self._learn([[row[place] for place in own] for row in shares])
        sums = [
            math.fsum(w * share for w, share in zip(self._weights, column, strict=True))
            for column in zip(*shares, strict=True)
        ]
        return [
            each.model_copy(update={"score": 0.0 - math.log(value) if value > 0 else None})
            for each, value in zip(scored, sums, strict=True)
        ]

    def _learn(self, shares: Sequence[Sequence[float]]) -> None:
        """Multiply the weights by what the other members' shares say.

        Args:
            shares: the shares of the members' segments, [member, proposer].
        """
        self._rounds += 1
        count = len(shares)
        if count == 1:
            return
        step = self._rate * math.sqrt(1 / count) / self._rounds
        for place in range(count):
            others = [each for each in range(count) if each != place]
            wins = sum(shares[j][place] >= shares[j][k] for j in others for k in others)
            self._weights[place] *= math.exp(step * max(wins, 1) / len(others) ** 2)
        total = math.fsum(self._weights)
        self._weights = [weight / total for weight in self._weights]
