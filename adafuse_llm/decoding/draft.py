"""Lossless drafting: nodes that are evaluated before the algorithm needs them.

A draft is a set of nodes that a pass evaluates in addition, because the algorithm will probably
need them. If it does, they cost no pass of their own. If not, a few tokens were processed for
nothing. No result depends on them. These are drafted, in passes that are made anyway:

* spans that other members proposed in this round, which have to be scored in any case; if the
  member would have said the same, its own proposal needs no further pass;
* what follows a candidate that is likely to win: the words that its proposer already knows, and
  the tokens that the member itself would begin the next round with;
* what followed where the last few tokens occurred before (`Lookup`): answers quote.

Losers that extend the winner need no draft, as they stay in the trees. While rounds are unanimous,
the lead, the member that proposes first, runs ahead and the others check several rounds at once.

Nothing is kept of a draft itself. How likely a source is to be right is measured on what the rounds
commit, whether it was drafted or not, so that a source which does not pay is left alone, and comes
back once it would.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from typing_extensions import override

from adafuse_llm.backends.base import LimitsDrafting, SupportsPlacement
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.lead import Lead
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.lookup import Lookup
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.odds import DRAFT_ODDS, MAX_DRAFT_TOKENS, PRIOR_ODDS, Odds
from adafuse_llm.decoding.propose import Proposal, propose
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.text.words import added
from adafuse_llm.tree import Node

WIN_ODDS = 0.4
"""Lowest odds of winning at which a candidate's last token is evaluated before it has won."""

RUN_AHEAD_ODDS = 0.6
"""Lowest odds of agreement at which the lead runs ahead. Unused tokens cost whole passes."""

MIN_RESPONSE_TOKENS = 4
"""Minimum number of response tokens that the bound on drafts is computed with."""


class Drafting(Protocol):
    """Decides in which order members propose, and what their passes evaluate in addition."""

    def propose(self, config: AdaFuseConfig, *, first_word: bool) -> Steps[list[Proposal]]:
        """Proposals of a round, in member order."""
        ...

    def likely(self, candidate: PoolCandidate) -> bool:
        """Whether a candidate of the complete pool may well win."""
        ...

    def observe(self, winner: PoolCandidate) -> None:
        """The round's winner is committed."""
        ...


class NoDrafts(Drafting):
    """Every member proposes on its own, all side by side."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)

    @override
    def propose(self, config: AdaFuseConfig, *, first_word: bool) -> Steps[list[Proposal]]:
        return in_lockstep([propose(member, config) for member in self._members])

    @override
    def likely(self, candidate: PoolCandidate) -> bool:
        return True

    @override
    def observe(self, winner: PoolCandidate) -> None:
        pass


class Drafts:
    """What a request drafts. Members that share a device propose one after another, so that each
    checks what those before it said; devices work side by side. In a crowd all members propose
    side by side: what many requests ask of a member at the same time goes into one pass, which
    saves more.

    Args:
        members: the request's members; their passes take drafts along from now on.
        crowded: whether many requests are being decoded.
    """

    def __init__(
        self, members: Sequence[Member], crowded: Callable[[], bool] = lambda: False
    ) -> None:
        self._members = tuple(members)
        self._crowded = crowded
        by_device = defaultdict(list)
        for member in self._members:
            backend = member.backend
            by_device[backend.device if isinstance(backend, SupportsPlacement) else None].append(
                member
            )
            member.drafter = self
        self._leads = [Lead(group) for group in by_device.values()]
        self._lookups = {member: Lookup() for member in self._members}
        self._unanimous = Odds(PRIOR_ODDS)
        self._wins: dict[tuple[int, int, bool], Odds] = {}
        self._start(first_word=True, branches=1, threshold=1.0)

    def propose(self, config: AdaFuseConfig, *, first_word: bool) -> Steps[list[Proposal]]:
        """Proposals of a round, in member order; the lead's come first, within a device."""
        self._start(
            first_word=first_word,
            branches=config.branching_factor,
            threshold=config.margin_threshold,
        )
        if self._crowded():
            orders = [[member] for member in self._members]
        else:
            orders = [lead.order() for lead in self._leads]
        yield from in_lockstep([self._in_turn(order, config) for order in orders])
        return [self._proposals[member] for member in self._members]

    def _start(self, *, first_word: bool, branches: int, threshold: float) -> None:
        self._pool = Pool(first_word=first_word)
        self._proposals: dict[Member, Proposal] = {}
        self._likeliest: dict[Member, PoolCandidate] = {}
        self._sizes: dict[Member, int] = {}  # tokens of the likeliest span
        self._seen: list[tuple[Odds, PoolCandidate]] = []
        self._branches, self._threshold = branches, threshold

    def _in_turn(self, order: Sequence[Member], config: AdaFuseConfig) -> Steps[None]:
        """Members propose one after another; the first runs ahead for the others."""
        for member in order:
            passes = member.passes
            self._proposals[member] = yield from propose(member, config)
            self._likeliest[member] = self._pool.add(member, self._proposals[member])
            end = self._proposals[member].spans[0].node
            self._sizes[member] = end.length - member.tree.root.length
            self._seen += [(self._odds(each), each) for each in self._pool.candidates]
            if len(order) > 1 and member is order[0] and member.passes > passes:
                yield from self._run_ahead(member, config)

    def _run_ahead(self, lead: Member, config: AdaFuseConfig) -> Steps[None]:
        """Go on beyond the likeliest span for as long as all are likely to agree."""
        span, size = self._proposals[lead].spans[0], self._sizes[lead]
        rounds = 0 if span.stops else self._unanimous.length(threshold=RUN_AHEAD_ODDS)
        left = config.max_new_tokens - lead.response_tokens - size
        for _ in range(min(rounds * size, MAX_DRAFT_TOKENS, left)):
            ahead = _greedy(lead, span.node)
            if ahead is None or ahead.length > _limit(lead, lead.tree.root.length):
                return
            yield from lead.draft(ahead)
            if ahead.next is None:
                return

    def likely(self, candidate: PoolCandidate) -> bool:
        """Whether a candidate is likely to win, given who has proposed it so far."""
        return self._odds(self._pool.find(candidate)).value >= WIN_ODDS

    def observe(self, winner: PoolCandidate) -> None:
        """Learn from a round. Its winner is committed."""
        won = self._pool.find(winner)
        self._unanimous.learn(all(each is won for each in self._likeliest.values()))
        for odds, candidate in self._seen:
            odds.learn(candidate is won)
        for lead in self._leads:
            lead.learn(self._likeliest, self._sizes)

    def _odds(self, candidate: PoolCandidate) -> Odds:
        """Return the odds that a candidate wins, given who has proposed it so far."""
        proposed, agreed = len(self._proposals), len(candidate.proposers)
        likeliest = any(each is candidate for each in self._likeliest.values())
        prior = agreed / len(self._members) if likeliest else 0.0
        return self._wins.setdefault((proposed, agreed, likeliest), Odds(prior))

    def extra_nodes(self, member: Member, wanted: Sequence[Node]) -> Sequence[Node]:
        """Return the nodes that a pass of `member` evaluates in addition."""
        root = member.tree.root
        limit = _limit(member, root.length)
        if limit <= root.length:
            return ()
        if root.next is None and not member.passes:
            return self._after_prompt(member, limit)
        found = dict.fromkeys(wanted)
        may_waste = self._may_waste(member)
        tips = [(node, 1.0) for node in wanted] if may_waste else []
        self._pool.expect(member)
        for candidate in self._pool.candidates:
            end = self._pool.place(member, candidate)
            if end is not None:
                path = member.tree.path(end)
                found.update(dict.fromkeys(path if self.likely(candidate) else path[:-1]))
                if may_waste and not candidate.stops:
                    tips += self._after(member, candidate, end)
        for node, _ in tips:
            found.update(dict.fromkeys(member.tree.path(node)))
        inner = {node.parent for node in found}
        for node, odds in tips:
            if node not in inner and node.length < limit:
                found.update(dict.fromkeys(self._lookups[member].after(member, node, odds)))
        for node in wanted:
            del found[node]
        return [node for node in found if node.next is None and node.length <= limit]

    def _after_prompt(self, member: Member, limit: int) -> list[Node]:
        """Likeliest spans of those who have proposed, as they wrote them: where the member begins
        with other whitespace they are in vain, which next to a prompt costs little.
        """
        found: dict[Node, None] = {}
        for candidate in dict.fromkeys(self._likeliest.values()):
            placed = member.place(candidate.text)
            if placed is not None and placed[0].length <= limit:
                found.update(dict.fromkeys(member.tree.path(placed[0])))
        return list(found)

    def _may_waste(self, member: Member) -> bool:
        """Whether a member has processed few enough tokens to draft what may be in vain: not more
        than 2 + B for each that was committed.
        """
        processed = member.tokens + member.reused - member.prompt_tokens
        return processed <= (2 + self._branches) * max(member.response_tokens, MIN_RESPONSE_TOKENS)

    def _after(
        self, member: Member, candidate: PoolCandidate, end: Node
    ) -> Iterator[tuple[Node, float]]:
        """Nodes after a candidate that may win, with the odds that it does."""
        odds = self._odds(candidate).value
        if odds < DRAFT_ODDS:
            return
        proposer = candidate.proposers[0]
        if proposer is not member:
            known = _known_after(proposer, candidate.ends[proposer])
            placed = member.place(known, end) if known else None
            if placed is not None:
                yield placed[0], odds
                return
        yield from ((node, odds) for node in self._next(member, end))

    def _next(self, member: Member, end: Node) -> Iterable[Node]:
        """The first nodes after `end` that are not evaluated, as a next round would ask for them;
        `end` itself while it is not.
        """
        if end.next is None or member.is_full(end):
            return [end]
        branches = 1 if end.next.margin >= self._threshold else self._branches
        starts = [
            member.tree.child(end, token)
            for token in end.next.tokens[:branches]
            if token not in member.end_ids
        ]
        missing = [node for node in starts if node.next is None]
        if missing or not starts:
            return missing
        ahead = _greedy(member, end)
        return [ahead] if ahead else []


def _limit(member: Member, length: int) -> int:
    """The longest sequence that drafts may reach."""
    backend = member.backend
    limit = backend.draft_limit(length) if isinstance(backend, LimitsDrafting) else sys.maxsize
    return min(limit, member.window or sys.maxsize)


def _greedy(member: Member, node: Node) -> Node | None:
    """The first node on the likeliest path after `node` that is not evaluated; None where the
    path ends before, or is long enough.
    """
    start = node.length
    while node.next is not None:
        token = node.next.greedy
        if (
            token in member.end_ids
            or member.is_full(node)
            or node.length - start >= MAX_DRAFT_TOKENS
        ):
            return None
        node = member.tree.child(node, token)
    return node


def _known_after(member: Member, end: Node) -> str:
    """Whole words that `member` would write after `end`, as far as it has been evaluated."""
    node = end
    while node.next is not None and (child := node.children.get(node.next.greedy)) is not None:
        node = child
    known = added(member.text(end), member.text(node))
    words = re.match(r".*\S(?=\s)", known, re.DOTALL)
    return words[0] if words else ""
