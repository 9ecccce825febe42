"""Lossless drafting: nodes that are evaluated before the algorithm asks for them.

A draft is a set of nodes that a pass takes along because they will probably be asked for. If they
are, they cost no pass of their own; if not, a few tokens were processed for nothing. No result
depends on them. What is drafted, in passes that are made anyway:

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

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Protocol

from typing_extensions import override

from adafuse_llm.backends.base import LimitsDrafting, SupportsPlacement
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.member import RECENT, Member, Steps, in_lockstep
from adafuse_llm.decoding.propose import Proposal, propose
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.text.words import added
from adafuse_llm.tree import Node

WORTH = 0.5
"""Odds of being asked for from which a token is drafted: what a token more costs of a pass, and
what it may cost in vain."""

LIKELY = 0.4
"""Odds of winning from which a candidate's last token is evaluated before it has won."""

AHEAD = 0.6
"""Odds from which the lead runs ahead: in vain, that costs passes."""

EARLY = 4
"""Committed tokens that a response is taken to have at least, where drafts are bounded."""

LONGEST = 16
"""Most tokens drafted in a row."""

ASSUMED, MEMORY = 4, 20
"""Observations that a first guess counts for, and that an average remembers."""

EVEN = 0.5
"""Odds of what nothing is known about."""

GRAMS = (4, 3, 2)
"""Numbers of last tokens that are looked up, the longest match counts."""

SWITCH = 0.85
"""Another member takes the lead where that costs at most this share."""


class Drafting(Protocol):
    """In which order members propose, and what their passes take along."""

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


class Odds:
    """How often something was right: an average that follows the request.

    Args:
        value: what is assumed at first; it counts as much as `ASSUMED` observations.
    """

    __slots__ = ("_seen", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self._seen = ASSUMED

    def learn(self, right: bool) -> None:
        """Take in an observation."""
        self._seen = min(self._seen + 1, MEMORY)
        self.value += (right - self.value) / self._seen

    def length(self, first: float = 1.0, worth: float = WORTH) -> int:
        """How many in a row are right with odds of `worth`, where the first depends on something
        of odds `first`.
        """
        if first * self.value < worth:
            return 0
        if self.value**LONGEST * first >= worth:
            return LONGEST
        return int(math.log(worth / first) / math.log(self.value))


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
        self._unanimous = Odds(EVEN)
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
        rounds = 0 if span.stops else self._unanimous.length(worth=AHEAD)
        left = config.max_new_tokens - lead.response_tokens - size
        for _ in range(min(rounds * size, LONGEST, left)):
            ahead = _greedy(lead, span.node)
            if ahead is None or ahead.length > _limit(lead, lead.tree.root.length):
                return
            yield from lead.draft(ahead)
            if ahead.next is None:
                return

    def likely(self, candidate: PoolCandidate) -> bool:
        """Whether a candidate may well win, told from who has proposed it so far."""
        return self._odds(self._pool.find(candidate)).value >= LIKELY

    def observe(self, winner: PoolCandidate) -> None:
        """Learn from a round. Its winner is committed."""
        won = self._pool.find(winner)
        self._unanimous.learn(all(each is won for each in self._likeliest.values()))
        for odds, candidate in self._seen:
            odds.learn(candidate is won)
        for lead in self._leads:
            lead.learn(self._likeliest, self._sizes)

    def _odds(self, candidate: PoolCandidate) -> Odds:
        """The odds that a candidate wins, told from who has proposed it so far."""
        proposed, agreed = len(self._proposals), len(candidate.proposers)
        likeliest = any(each is candidate for each in self._likeliest.values())
        prior = agreed / len(self._members) if likeliest else 0.0
        return self._wins.setdefault((proposed, agreed, likeliest), Odds(prior))

    def extra_nodes(self, member: Member, wanted: Sequence[Node]) -> Sequence[Node]:
        """What a pass of `member` takes along."""
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
        return processed <= (2 + self._branches) * max(member.response_tokens, EARLY)

    def _after(
        self, member: Member, candidate: PoolCandidate, end: Node
    ) -> Iterator[tuple[Node, float]]:
        """Nodes after a candidate that may win, with the odds that it does."""
        odds = self._odds(candidate).value
        if odds < WORTH:
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


class Lead:
    """Who proposes first among members that propose one after another.

    A round led by l is expected to cost c_l n_l + Σ c_k (1 + (1 - a_kl) n_k) seconds, summed over
    the others k: c seconds per pass, n tokens of a proposal, a how often two members agree; all
    measured in this request. Before they are, the first member leads.

    Attributes:
        member: the lead.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.member = members[0]
        self._members = tuple(members)
        self._sizes: dict[Member, float] = {}
        self._agree = {pair: Odds(EVEN) for pair in map(frozenset, combinations(members, 2))}

    def order(self) -> list[Member]:
        """The members as they propose in this round, the lead first."""
        costs = {member: self._cost(member) for member in self._members}
        best = min(self._members, key=costs.__getitem__)
        if costs[best] < SWITCH * costs[self.member]:
            self.member = best
        return [self.member, *(member for member in self._members if member is not self.member)]

    def learn(self, likeliest: dict[Member, PoolCandidate], sizes: dict[Member, int]) -> None:
        """Take in what members proposed, and how many tokens it took."""
        for pair, odds in self._agree.items():
            one, other = pair
            odds.learn(likeliest[one] is likeliest[other])
        for member in self._members:
            size = self._sizes.get(member, sizes[member])
            self._sizes[member] = size + RECENT * (sizes[member] - size)

    def _cost(self, lead: Member) -> float:
        """Seconds expected of a round that `lead` leads."""
        if not self._sizes or any(member.pass_seconds is None for member in self._members):
            return 0.0
        cost = 0.0
        for member in self._members:
            own = self._sizes[member]
            passes = own
            if member is not lead:
                passes = 1 + (1 - self._agree[frozenset((member, lead))].value) * own
            cost += passes * (member.pass_seconds or 0.0)
        return cost


class Lookup:
    """Where the last few tokens of a member occurred before, and what followed.

    Built when it is first used: about a microsecond per token of the prompt.
    """

    def __init__(self) -> None:
        self._read = 0
        self._found: list[dict[tuple[int, ...], int]] = [{} for _ in GRAMS]
        self._odds = [Odds(EVEN) for _ in GRAMS]

    def after(self, member: Member, node: Node, odds: float) -> list[Node]:
        """What may follow `node`, where that is reached with the given odds."""
        ids = member.tree.ids
        self._read_on(ids)
        last = [*ids[-GRAMS[0] :], *member.tree.tokens(node)][-GRAMS[0] :]
        for size, found, right in zip(GRAMS, self._found, self._odds, strict=True):
            start = found.get(tuple(last[-size:]))
            if start is not None:
                return self._copy(member, node, ids[start : start + right.length(odds)])
        return []

    def _copy(self, member: Member, node: Node, tokens: Sequence[int]) -> list[Node]:
        copied = []
        for token in tokens:
            if member.is_full(node) or token in member.end_ids:
                break
            node = member.tree.child(node, token)
            copied.append(node)
        return copied

    def _read_on(self, ids: Sequence[int]) -> None:
        """Learn the committed tokens that were not read yet: first the odds, then the places."""
        if self._read:
            for end in range(self._read, len(ids)):
                self._learn(ids, end)
        else:
            for size, found in zip(GRAMS, self._found, strict=True):
                grams = zip(*(ids[shift:] for shift in range(size)), strict=False)
                found.update(zip(grams, range(size, len(ids)), strict=False))
        self._read = len(ids)

    def _learn(self, ids: Sequence[int], end: int) -> None:
        known = False
        for size, found, odds in zip(GRAMS, self._found, self._odds, strict=True):
            gram = tuple(ids[end - size : end])
            start = found.get(gram)
            if start is not None and not known:
                odds.learn(ids[start] == ids[end])
                known = True
            found[gram] = end


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
        if token in member.end_ids or member.is_full(node) or node.length - start >= LONGEST:
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
