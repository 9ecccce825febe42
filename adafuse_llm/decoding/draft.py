"""Lossless drafting: nodes that are evaluated before the algorithm needs them.

Drafts are additional nodes that a pass evaluates because the algorithm will probably need them
later. If the algorithm needs a draft, it does not need another pass for it. If not, the pass has
processed a few tokens too many. Drafts never change a result. Passes that the algorithm makes
anyway carry three kinds of drafts:

* Spans that other members proposed in this round. The member must score these spans anyway. If the
  member would propose the same span, its proposal needs no further pass.
* Nodes after a candidate that is likely to win. These are the words that the candidate's proposer
  has already decoded after it. If there are none, they are the tokens that would begin the member's
  next proposal.
* Tokens that followed an earlier occurrence of the last few tokens (`Lookup`), because answers
  often quote earlier text and repeat its words. The candidates that did not win are earlier text,
  too, because members often propose them again.

A losing candidate that extends the winner needs no draft, because its nodes stay in the tree.

`Drafts.around` adds the drafts to the queries of a request, between the algorithm and the driver.
The algorithm and its members know nothing of them.

The lead is the member that proposes first. While rounds are unanimous, the lead also evaluates
nodes beyond its proposal (it runs ahead). The other members then check several rounds in one pass.

Each source of drafts has a hit rate, which says how often its guesses agree with the committed
tokens. It is measured even while the source is not used. A source that is often wrong is therefore
not used until its guesses become right again.

Each member also has a price for a token in a pass (`adafuse_llm.decoding.costs`). A draft whose
chance is below its price costs more than it saves, and is left out. Spans that the member must
score anyway cost the same now or later. The lowest chance of a draft rises with the number of
tokens that the member has processed for each committed token.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from typing_extensions import override

from adafuse_llm.backends.base import LimitsDrafting, lane
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.hit_rate import DRAFT_CHANCE, MAX_DRAFT_TOKENS, PRIOR_CHANCE, HitRate
from adafuse_llm.decoding.lead import Lead
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.lookup import Lookup
from adafuse_llm.decoding.member import Member, MemberQuery, Query, Steps
from adafuse_llm.decoding.propose import Proposal
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.text.words import added
from adafuse_llm.tree import Node

E = TypeVar("E")

WIN_CHANCE = 0.4
"""Lowest chance of winning at which a candidate's last token is evaluated before the round ends, if
its price is not higher."""

RUN_AHEAD_CHANCE = 0.6
"""Lowest chance of a unanimous round at which the lead runs ahead. Each unused token costs a pass.
If tokens have a price, a higher one may be necessary (`_run_ahead_chance`)."""

KNOWN_CHANCE = 0.5
"""Lowest chance of winning at which the words that a candidate's proposer knows after it are
encoded for another member."""

MIN_RESPONSE_TOKENS = 4
"""Number of response tokens that the limit on drafts assumes while the response is shorter."""


class Drafting(Protocol):
    """Interface that orders the members' proposals and chooses the drafts of their passes."""

    def around(
        self, steps: Generator[tuple[Query, ...] | E, None, None]
    ) -> Generator[tuple[Query, ...] | E, None, None]:
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
        self, steps: Generator[tuple[Query, ...] | E, None, None]
    ) -> Generator[tuple[Query, ...] | E, None, None]:
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
        by_lane = defaultdict(list)
        for member in self._members:
            by_lane[lane(member.backend)].append(member)
        self._leads = [Lead(group) for group in by_lane.values()]
        self._lookups = {member: Lookup() for member in self._members}
        self._limiting = {
            member: member.backend
            for member in self._members
            if isinstance(member.backend, LimitsDrafting)
        }
        self._unanimous = HitRate(PRIOR_CHANCE)
        self._wins: dict[tuple[int, int, bool], HitRate] = {}
        self._is_used = False
        self._failed: set[Member] = set()
        self._start(AdaFuseConfig(branching_factor=1, margin_threshold=1.0))

    def around(
        self, steps: Generator[tuple[Query, ...] | E, None, None]
    ) -> Generator[tuple[Query, ...] | E, None, None]:
        """Yield the steps of a request, and add drafts to its queries."""
        for step in steps:
            if not isinstance(step, tuple):
                yield step
                continue
            queries = tuple(map(self._with_drafts, step))
            yield queries
            for query in queries:
                if isinstance(query, MemberQuery) and query.drafts:
                    drafts = query.query.evaluate[-query.drafts :]
                    if any(node.next is None for node in drafts):
                        self._failed.add(query.member)

    def _with_drafts(self, query: Query) -> Query:
        if not isinstance(query, MemberQuery) or not query.may_draft:
            return query
        if not self._is_used or query.member in self._failed:
            return query
        return query.with_drafts(self.extra_nodes(query.member, query.query.evaluate))

    def together(
        self, proposals: Mapping[Member, Steps[Proposal]], config: AdaFuseConfig
    ) -> Steps[list[Proposal]]:
        """Run the computations of a round's proposals. Return the proposals in the same order.

        The lead of each lane proposes first.
        """
        self._is_used = True
        self._start(config)
        if self._crowded():
            orders = [[member] for member in self._members]
        else:
            orders = [lead.order() for lead in self._leads]
        yield from in_lockstep([self._in_turn(order, proposals, config) for order in orders])
        return [self._proposals[member] for member in proposals]

    def _start(self, config: AdaFuseConfig) -> None:
        self._pool = Pool(self._members[0].opening)
        self._proposals: dict[Member, Proposal] = {}
        self._likeliest: dict[Member, PoolCandidate] = {}
        self._sizes: dict[Member, int] = {}  # number of tokens of the likeliest span
        self._seen: list[tuple[HitRate, PoolCandidate]] = []
        self._branches, self._threshold = config.branches, config.margin_threshold
        self._max_new_tokens = config.max_new_tokens

    def _in_turn(
        self,
        order: Sequence[Member],
        proposals: Mapping[Member, Steps[Proposal]],
        config: AdaFuseConfig,
    ) -> Steps[None]:
        """Have members propose one after another. The first one may run ahead."""
        for member in order:
            passes = member.passes
            self._proposals[member] = yield from proposals[member]
            self._likeliest[member] = self._pool.add(member, self._proposals[member])
            end = self._proposals[member].spans[0].node
            self._sizes[member] = end.length - member.tree.root.length
            self._seen += [
                (self._win_rate(candidate), candidate) for candidate in self._pool.candidates
            ]
            if len(order) > 1 and member is order[0] and member.passes > passes:
                yield from self._run_ahead(member, order[1:], config)

    def _run_ahead(
        self, lead: Member, others: Sequence[Member], config: AdaFuseConfig
    ) -> Steps[None]:
        """Evaluate nodes after the lead's likeliest span while all members are likely to agree."""
        span, size = self._proposals[lead].spans[0], self._sizes[lead]
        rounds = 0 if span.stops else self._unanimous.length(threshold=_run_ahead_chance(others))
        left = config.max_new_tokens - lead.response_tokens - size
        for _ in range(min(rounds * size, MAX_DRAFT_TOKENS, left)):
            ahead = _greedy(lead, span.node)
            if ahead is None or ahead.length > self._limit(lead):
                return
            if ahead is not span.node and not self._may_run_ahead(ahead):
                return
            if lead in self._failed or not lead.permitted([ahead]):
                return
            yield (MemberQuery(lead, lead.query([ahead]), drafts=1, may_draft=True),)
            if ahead.next is None:
                return

    def _may_run_ahead(self, node: Node) -> bool:
        """Return whether the lead may evaluate a node after its span.

        The lead must have no reason to propose alternatives to the node. Alternatives would need
        passes of their own, so running ahead would save hardly any.
        """
        before = node.parent.next if node.parent is not None else None
        return self._branches == 1 or before is None or before.margin >= self._threshold

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
        self._unanimous.learn(all(candidate is won for candidate in self._likeliest.values()))
        for rate, candidate in self._seen:
            rate.learn(candidate is won)
        for lead in self._leads:
            lead.learn(self._likeliest, self._sizes)
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
        if root.next is None and not member.passes:
            return self._after_prompt(member, limit)
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

    def _after_prompt(self, member: Member, limit: int) -> list[Node]:
        """Return the nodes of the likeliest spans of other members, and copies of earlier text.

        The spans keep their proposers' leading whitespace. If the member's own proposal begins with
        different whitespace, the nodes are useless, but they cost little compared with the prompt.
        If tokens have a price, there are no such nodes.
        """
        if _price(member):
            return []
        root = member.tree.root
        copied = self._lookups[member].after(member, root, 1.0)
        longest = min(limit, root.length + self._max_new_tokens)
        nodes = dict.fromkeys(node for node in copied if node.length <= longest)
        for candidate in dict.fromkeys(self._likeliest.values()):
            encoded = member.encode(self._pool.written(member, candidate.text))
            if encoded is not None and encoded[0].length <= limit:
                nodes.update(dict.fromkeys(member.tree.path(encoded[0])))
        return list(nodes)

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
        if chance < self._draft_chance(member):
            return
        proposer = candidate.proposers[0]
        if proposer is not member and chance >= KNOWN_CHANCE:
            known = _known_after(proposer, candidate.ends[proposer])
            encoded = member.encode(known, end) if known else None
            if encoded is not None:
                yield encoded[0], chance
                return
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


def _run_ahead_chance(others: Sequence[Member]) -> float:
    """Return the lowest chance c of a unanimous round at which the lead runs ahead of `others`.

    A token that is needed saves 1 - p of a pass, where p is the price of a token for the member
    that checks it. A token that is not needed costs a pass. So c (1 - p) must be at least 1 - c. At
    p = 1 nothing can be saved.
    """
    price = min(map(_price, others))
    return max(RUN_AHEAD_CHANCE, 1 / (2 - price)) if price < 1 else math.inf


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


def _known_after(member: Member, end: Node) -> str:
    """Return the complete words that `member` has already decoded greedily after `end`."""
    node = end
    while node.next is not None and (child := node.children.get(node.next.chosen)) is not None:
        node = child
    known = added(member.text(end), member.text(node))
    words = re.match(r".*\S(?=\s)", known, re.DOTALL)
    return words[0] if words else ""
