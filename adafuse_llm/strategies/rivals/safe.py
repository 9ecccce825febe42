"""SAFE: one member writes, and the members ensemble only where they disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from adafuse_llm.config import GRAMMARS, AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal, Span
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, choose_best, to_result
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.strategies.rivals.token_level import (
    averaged,
    normalized_union,
    offer_tokens,
    scored_by,
    union,
)
from adafuse_llm.text.words import CHARACTER_TOKENS
from adafuse_llm.tree import Node

SURE = 0.5
"""Mean probability above which a drafted token is accepted, and below which a merge is sharpened.
"""


@dataclass(frozen=True)
class SAFE(Strategy):
    """UniTE only at tokens at which the members may choose another token (arXiv 2510.15346v2).

    The first member is the drafter, and the others are verifiers. The drafter writes `draft` tokens
    greedily, and every verifier reads them in one pass. The first token that passes these two tests
    is merged, and the tokens before it are committed as one span:

    1. The text before the token ends at a token of every verifier's encoding of the draft.
    2. Not every verifier's likeliest next token is its own token there, and the weighted mean of
       the probabilities that all members give to their own tokens there is at most 1/2.

    If no token passes the tests, the span is committed up to the last end that all verifiers share.
    A merge is a round of `UniTE`. If the highest average is below 1/2, the weighted geometric mean
    replaces the average (the default of the authors' code; its heuristic is left out).

    The score of a merged token is -log of the average or of the geometric mean, and the NLL is -log
    of the member's normalized probability. The score of a span is the drafter's NLL, which is the
    mean in nats per token.

    Cost: the drafter makes one pass per token. A verifier makes one pass per draft, and none for a
    merge, because the draft's pass has evaluated the place. If a merge replaces a token, the rest
    of the draft is lost.

    Departures from the paper: the drafter writes one more token, which only shows where the
    verifiers' tokens end, and which begins the next draft. The members keep the tokens of committed
    text, while the paper encodes the whole response again for each draft. Token trees keep the
    evaluated tokens, so the authors' buffer of caches is not needed. The end of the response is a
    token like others, so an accepted end ends the response. A verifier that wants to end it where
    the drafter does not makes the tests fail, and its end is a candidate of the merge. The authors'
    code does not see this. The first word of a reply to messages, spaces at the end of a prompt,
    and a draft that a verifier cannot read are merged token by token.

    Args:
        draft: number n of drafted tokens. A token counts with the tokens that complete its
            character.
        top_k: number of likeliest tokens of each member in a merge.

    Raises:
        InvalidOptionError: `draft` or `top_k` is less than one.
    """

    draft: int = 5
    top_k: int = 10

    name = "safe"
    options = frozenset({*GRAMMARS, "weights"})

    def __post_init__(self) -> None:
        for name in ("draft", "top_k"):
            if (value := getattr(self, name)) < 1:
                raise InvalidOptionError(f"SAFE({name}=...) must be 1 or more; got {value!r}")

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, self.top_k)

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return (self.draft + 1) * (1 + CHARACTER_TOKENS)

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return _Cycles(context.members, self.draft, self.top_k).play


class _Reading:
    """A verifier's tokens of a draft.

    Attributes:
        verifier: the verifier.
        line: the nodes from the root to the end of the draft.
        places: position in `line` by the text up to this position.
    """

    def __init__(self, verifier: Member, end: Node) -> None:
        self.verifier = verifier
        self.line = [verifier.tree.root, *verifier.tree.path(end)]
        self.places = {verifier.text(node): place for place, node in enumerate(self.line)}

    def read(self, *, stops: bool) -> Steps[None]:
        """Read the draft in one pass."""
        return self.verifier.evaluate(self.line if stops else self.line[:-1], self.line[-1:])

    def has_token(self, before: str, *, stops: bool) -> bool:
        """Return whether a token of the verifier, or the end of the response, follows a text."""
        return before in self.places and (stops or self.places[before] + 1 < len(self.line))

    def judge(self, before: str, *, stops: bool) -> tuple[bool, float]:
        """Return whether the verifier's token after a text is its likeliest one, and its log p."""
        node = self.line[self.places[before]]
        known, mass = self.verifier.next(node), self.verifier.mass(node)
        if stops:
            return known.tokens[0] in self.verifier.end_ids, known.end_logprob - mass
        following = self.line[self.places[before] + 1]
        assert following.logprob is not None, "the draft is read"
        return known.tokens[0] == following.token, following.logprob - mass


Draft = Sequence[tuple[Node, Node | None]]
"""The drafter's nodes before and after each drafted token. None is the end of the response."""


class _Cycles:
    """The rounds of one request."""

    def __init__(self, members: Sequence[Member], draft: int, top_k: int) -> None:
        self._members = members
        self._drafter = members[0]
        self._tokens = draft
        self._top_k = top_k
        self._merge_after: Node | None = None

    def play(self) -> Steps[RoundOutcome]:
        """Commit a span of the drafter, or merge one token."""
        opening = self._drafter.opening
        if opening.is_reply or opening.spaces or self._drafter.tree.root is self._merge_after:
            return (yield from self._merge())
        draft = yield from self._write()
        before, end = draft[-1]
        text = self._drafter.text(end or before)
        placed = [(member, member.encode(text)) for member in self._members[1:]]
        readings = [_Reading(member, each[0]) for member, each in placed if each and each[1]]
        if len(readings) < len(placed):
            return (yield from self._merge())
        yield from in_lockstep([each.read(stops=end is None) for each in readings])
        for count, (before, after) in enumerate(draft[: self._tokens]):
            if self._may_differ(readings, before, after):
                self._merge_after = before
                return (
                    self._accept(draft[:count], readings) if count else (yield from self._merge())
                )
        tested = min(len(draft), self._tokens)
        while tested and not self._is_shared(readings, draft[tested - 1]):
            tested -= 1
        return self._accept(draft[: tested or len(draft)], readings)

    def _write(self) -> Steps[Draft]:
        """Draft tokens, and one more."""
        drafter = self._drafter
        draft: list[tuple[Node, Node | None]] = []
        node: Node | None = drafter.tree.root
        while node is not None and len(draft) <= self._tokens and not drafter.is_full(node):
            yield from drafter.evaluate([node])
            offered = yield from offer_tokens(drafter, drafter.next(node).tokens[:1], node)
            (span,) = offered.spans
            draft.append((node, None if span.stops else span.node))
            node = draft[-1][1]
        return draft

    def _may_differ(self, readings: Sequence[_Reading], before: Node, after: Node | None) -> bool:
        """Return whether the members may choose another token than the drafted one."""
        drafter, stops = self._drafter, after is None
        text = drafter.text(before)
        if not all(each.has_token(text, stops=stops) for each in readings):
            return False
        judged = [each.judge(text, stops=stops) for each in readings]
        known = drafter.next(before)
        own = (known.end_logprob if stops else known.logprobs[0]) - drafter.mass(before)
        weights = [member.weight for member in self._members]
        chances = [math.exp(logprob) for logprob in (own, *(each for _, each in judged))]
        mean = math.fsum(w * p for w, p in zip(weights, chances, strict=True)) / math.fsum(weights)
        return not all(agrees for agrees, _ in judged) and mean <= SURE

    def _is_shared(self, readings: Sequence[_Reading], step: tuple[Node, Node | None]) -> bool:
        """Return whether a token of every verifier ends where a drafted token does."""
        text = self._drafter.text(step[1] or step[0])
        return all(text in each.places for each in readings)

    def _accept(self, draft: Draft, readings: Sequence[_Reading]) -> RoundOutcome:
        """Commit the beginning of a draft."""
        drafter = self._drafter
        before, end = draft[-1]
        span = Span(end or before, stops=end is None)
        margins = tuple(drafter.next(node).margin for node, _ in draft)
        pool = union([drafter], [Proposal((span,), margins)])
        (candidate,) = pool.candidates
        for each in readings:
            candidate.ends[each.verifier] = each.line[each.places[candidate.text]]
            candidate.exact.add(each.verifier)
            pool.encode(each.verifier, candidate)
        nll = [candidate.nll(member) for member in self._members]
        scored = to_result(candidate, self._members, nll, nll[0])
        others: dict[str, tuple[float, ...]] = {each.verifier.name: () for each in readings}
        return choose_best(pool, [scored], {drafter.name: margins, **others})

    def _merge(self) -> Steps[RoundOutcome]:
        """Play a round of UniTE."""
        members = self._members
        pool, shares, margins = yield from normalized_union(members, self._top_k)
        scored = averaged(members, pool.candidates, shares)
        if min(each.score for each in scored if each.score is not None) > -math.log(SURE):
            weighted = [(m.weight, row) for m, row in zip(members, shares, strict=True) if m.weight]
            total = math.fsum(weight for weight, _ in weighted)
            values = [
                math.exp(math.fsum(weight * row[place] for weight, row in weighted) / total)
                for place in range(len(scored))
            ]
            if any(values):
                scored = scored_by(members, pool.candidates, shares, values)
        return choose_best(pool, scored, margins)
