"""Lossless drafting: nodes that are evaluated before the algorithm needs them.

Drafts are additional nodes that a pass evaluates because the algorithm will probably need them
later. If the algorithm needs a draft, it does not need another pass for it. If not, the pass has
processed a few tokens too many. Drafts never change a result. Passes that the algorithm makes
anyway carry three kinds of drafts:

* Spans that other members proposed in this round. The member must score these spans anyway. If the
  member would propose the same span, its proposal needs no further pass.
* Nodes after a candidate that is likely to win: the tokens that would begin the member's next
  proposal.
* Tokens that followed an earlier occurrence of the last few tokens (`Lookup`), because answers
  often quote earlier text and repeat its words. The candidates that did not win are earlier text,
  too, because members often propose them again.

A losing candidate that extends the winner needs no draft, because its nodes stay in the tree.

`Drafts.around` adds the drafts to the queries of a request, between the algorithm and the driver.
The algorithm and its members know nothing of them.

Each source of drafts has a hit rate, which says how often its guesses agree with the committed
tokens. It is measured even while the source is not used. A source that is often wrong is therefore
not used until its guesses become right again.

Each member also has a price for a token in a pass (`adafuse_llm.decoding.costs`). A draft whose
chance is below its price costs more than it saves, and is left out. Spans that the member must
score anyway cost the same now or later. The lowest chance of a draft rises with the number of
tokens that the member has processed for each committed token.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from typing_extensions import override

from adafuse_llm.backends.base import LimitsDrafting, lane
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.hit_rate import DRAFT_CHANCE, MAX_DRAFT_TOKENS, HitRate
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.lookup import Lookup
from adafuse_llm.decoding.member import Member, MemberQuery, Steps
from adafuse_llm.decoding.propose import Proposal
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.tree import Node

E = TypeVar("E")

WIN_CHANCE = 0.4
"""Lowest chance of winning at which a candidate's last token is evaluated before the round ends, if
its price is not higher."""

MIN_RESPONSE_TOKENS = 4
"""Number of response tokens that the limit on drafts assumes while the response is shorter."""


class Drafting(Protocol):
    """Interface that orders the members' proposals and chooses the drafts of their passes."""

    def around(
        self, steps: Generator[tuple[MemberQuery, ...] | E, None, None]
    ) -> Generator[tuple[MemberQuery, ...] | E, None, None]:
        """Yield the steps of a request, and add drafts to its queries."""
        ...

    def together(
        self, proposals: Mapping[Member, Steps[Proposal]], config: AdaFuseConfig
    ) -> Steps[list[Proposal]]:
        """Run the computations of a round's proposals. Return the proposals in the same order."""
        ...

    def likely(self, member: Member, candidate: PoolCandidate) -> bool:
        """Return whether `member` should evaluate a candidate's last node before the round ends.

        The pool is complete.
        """
        ...

    def observe(self, winner: PoolCandidate) -> None:
        """Learn from the winner of a round."""
        ...


class NoDrafts(Drafting):
    """Drafting method that adds no drafts. All members propose at the same time."""

    @override
    def around(
        self, steps: Generator[tuple[MemberQuery, ...] | E, None, None]
    ) -> Generator[tuple[MemberQuery, ...] | E, None, None]:
        return steps

    @override
    def together(
        self, proposals: Mapping[Member, Steps[Proposal]], config: AdaFuseConfig
    ) -> Steps[list[Proposal]]:
        return in_lockstep(list(proposals.values()))

    @override
    def likely(self, member: Member, candidate: PoolCandidate) -> bool:
        return True

    @override
    def observe(self, winner: PoolCandidate) -> None:
        pass


class Drafts:
    """Drafting method of one request.

    Members of the same lane (`adafuse_llm.backends.base.lane`) propose one after another. The
    passes of a member also evaluate the spans that earlier members have proposed. Members of
    different lanes propose at the same time.
    While many requests are being decoded, all members propose at the same time. One pass of a
    member then serves several requests, which saves more than drafts do.

    Passes carry drafts from the first call of `together` on, so there are none in strategies that
    do not call it. A member whose drafts have failed drafts no more.

    Args:
        members: the request's members.
        crowded: function that returns whether many requests are being decoded.
    """

    def __init__(
        self, members: Sequence[Member], crowded: Callable[[], bool] = lambda: False
    ) -> None:
        self._members = tuple(members)
        self._crowded = crowded
        by_lane: defaultdict[str, list[Member]] = defaultdict(list)
        for member in self._members:
            by_lane[lane(member.backend)].append(member)
        self._lanes = list(by_lane.values())
        self._lookups = {member: Lookup() for member in self._members}
        self._limiting = {
            member: member.backend
            for member in self._members
            if isinstance(member.backend, LimitsDrafting)
        }
        self._wins: dict[tuple[int, int, bool], HitRate] = {}
        self._is_used = False
        self._failed: set[Member] = set()
        self._start(AdaFuseConfig(branching_factor=1, margin_threshold=1.0))

    def around(
        self, steps: Generator[tuple[MemberQuery, ...] | E, None, None]
    ) -> Generator[tuple[MemberQuery, ...] | E, None, None]:
        """Yield the steps of a request, and add drafts to its queries."""
        for step in steps:
            if not isinstance(step, tuple):
                yield step
                continue
            queries = tuple(map(self._with_drafts, step))
            yield queries
            for query in queries:
                if query.drafts:
                    drafts = query.query.evaluate[-query.drafts :]
                    if any(node.next is None for node in drafts):
                        self._failed.add(query.member)

    def _with_drafts(self, query: MemberQuery) -> MemberQuery:
        if not query.may_draft:
            return query
        if not self._is_used or query.member in self._failed:
            return query
        return query.with_drafts(self.extra_nodes(query.member, query.query.evaluate))

    def together(
        self, proposals: Mapping[Member, Steps[Proposal]], config: AdaFuseConfig
    ) -> Steps[list[Proposal]]:
        """Run the computations of a round's proposals. Return the proposals in the same order."""
        self._is_used = True
        self._start(config)
        groups = [[member] for member in self._members] if self._crowded() else self._lanes
        yield from in_lockstep([self._in_turn(group, proposals) for group in groups])
        return [self._proposals[member] for member in proposals]

    def _start(self, config: AdaFuseConfig) -> None:
        self._pool = Pool(self._members[0].opening)
        self._proposals: dict[Member, Proposal] = {}
        self._likeliest: dict[Member, PoolCandidate] = {}
        self._seen: list[tuple[HitRate, PoolCandidate]] = []
        self._branches, self._threshold = config.branches, config.margin_threshold

    def _in_turn(
        self, members: Sequence[Member], proposals: Mapping[Member, Steps[Proposal]]
    ) -> Steps[None]:
        """Have members propose one after another."""
        for member in members:
            self._proposals[member] = yield from proposals[member]
            self._likeliest[member] = self._pool.add(member, self._proposals[member])
            self._seen += [
                (self._win_rate(candidate), candidate) for candidate in self._pool.candidates
            ]

    def likely(self, member: Member, candidate: PoolCandidate) -> bool:
        """Return whether `member` should evaluate a candidate's last node before the round ends.

        This depends on the chance that the candidate wins, given its proposers so far.
        """
        return self._is_likely(member, self._pool.find(candidate))

    def _is_likely(self, member: Member, candidate: PoolCandidate) -> bool:
        """Like `likely`, for a candidate among the proposals so far."""
        return self._win_rate(candidate).value >= max(WIN_CHANCE, _price(member))

    def observe(self, winner: PoolCandidate) -> None:
        """Learn from the winner of a round."""
        won = self._pool.find(winner)
        for rate, candidate in self._seen:
            rate.learn(candidate is won)
        for candidate in self._pool.candidates:
            if candidate is not won:
                for member in candidate.exact:
                    self._lookups[member].add(member, candidate.ends[member])

    def _win_rate(self, candidate: PoolCandidate) -> HitRate:
        """Return how often candidates with such proposers win."""
        proposed, agreed = len(self._proposals), len(candidate.proposers)
        likeliest = candidate in self._likeliest.values()
        key = proposed, agreed, likeliest
        if key not in self._wins:
            self._wins[key] = HitRate(agreed / len(self._members) if likeliest else 0.0)
        return self._wins[key]

    def extra_nodes(self, member: Member, wanted: Sequence[Node]) -> Sequence[Node]:
        """Return the nodes that a pass of `member` evaluates in addition to `wanted`."""
        root = member.tree.root
        limit = self._limit(member)
        if limit <= root.length:
            return ()
        if root.next is None and not member.passes:  # the pass that reads the prompt
            return ()
        nodes = dict.fromkeys(wanted)
        threshold = self._draft_chance(member)
        may_waste = self._may_waste(member)
        tips = [(node, 1.0) for node in wanted] if may_waste else []
        self._pool.expect(member)
        for candidate in self._pool.candidates:
            end = self._pool.encode(member, candidate)
            if end is not None:
                path = member.tree.path(end)
                is_likely = self._is_likely(member, candidate)
                nodes.update(dict.fromkeys(path if is_likely else path[:-1]))
                if may_waste and not candidate.stops:
                    tips += self._after(member, candidate, end)
        for node, _ in tips:
            nodes.update(dict.fromkeys(member.tree.path(node)))
        inner = {node.parent for node in nodes}
        for node, chance in tips:
            if node not in inner and node.length < limit:
                copied = self._lookups[member].after(member, node, chance, threshold)
                nodes.update(dict.fromkeys(copied))
        for node in wanted:
            del nodes[node]
        return [node for node in nodes if node.next is None and node.length <= limit]

    def _limit(self, member: Member) -> int:
        """Return the maximum length of a sequence with drafts, in tokens."""
        limit = member.window or sys.maxsize
        backend = self._limiting.get(member)
        return (
            limit if backend is None else min(limit, backend.draft_limit(member.tree.root.length))
        )

    def _may_waste(self, member: Member) -> bool:
        """Return whether a member may draft nodes that the algorithm will perhaps never need.

        The member may do so while it has processed at most 2 + B tokens per committed token.
        """
        return _processed(member) <= 2 + self._branches

    def _draft_chance(self, member: Member) -> float:
        """Return the lowest chance at which a token is worth its price in a pass of `member`.

        It rises from `DRAFT_CHANCE` to 1 - 0.8 / (B + 1) while the number of processed tokens per
        committed token rises from B to B + 1. With many alternatives, a pass is only saved if the
        drafts of all alternatives are right. So tokens must be likelier.
        """
        branches = self._branches
        share = min(max(_processed(member) - branches, 0.0), 1.0)
        chance = DRAFT_CHANCE + share * (1 - 0.8 / (branches + 1) - DRAFT_CHANCE)
        return max(chance, _price(member))

    def _after(
        self, member: Member, candidate: PoolCandidate, end: Node
    ) -> Iterator[tuple[Node, float]]:
        """Yield nodes to draft after a candidate, each with the chance that the candidate wins."""
        chance = self._win_rate(candidate).value
        if chance >= self._draft_chance(member):
            yield from ((node, chance) for node in self._next(member, end))

    def _next(self, member: Member, end: Node) -> Iterable[Node]:
        """Return the first unevaluated nodes that a round after `end` would need.

        If `end` is not evaluated, return `end` itself.
        """
        if end.next is None or member.is_full(end):
            return [end]
        branches = 1 if end.next.margin >= self._threshold else self._branches
        starts = [
            member.tree.child(end, token)
            for token in end.next.branches(branches)
            if token not in member.end_ids
        ]
        missing = [node for node in starts if node.next is None]
        if missing or not starts:
            return missing
        ahead = _greedy(member, end)
        return [ahead] if ahead else []


def _price(member: Member) -> float:
    """Return the price of a draft of `member`, or 0 if it is too low to matter."""
    return member.pass_times.draft_price


def _processed(member: Member) -> float:
    """Return the tokens that a member has processed after the prompt, per committed token."""
    processed = member.tokens + member.reused - member.prompt_tokens
    return processed / max(member.response_tokens, MIN_RESPONSE_TOKENS)


def _greedy(member: Member, node: Node) -> Node | None:
    """Return the first unevaluated node on the greedy path after `node`.

    Return None if the path ends first, or if its first `MAX_DRAFT_TOKENS` tokens are all evaluated.
    """
    start = node.length
    while node.next is not None:
        token = node.next.chosen
        if (
            token in member.end_ids
            or member.is_full(node)
            or node.length - start >= MAX_DRAFT_TOKENS
        ):
            return None
        node = member.tree.child(node, token)
    return node
