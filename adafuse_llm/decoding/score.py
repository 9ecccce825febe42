"""The pool of a round, and what each member makes of it (§3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal
from adafuse_llm.text.words import added, leading_space
from adafuse_llm.tree import Node


class PoolCandidate:
    """A span of the pool, with its tokens at each member that has placed it.

    Attributes:
        text: as its first proposer wrote it.
        stops: whether the response ends after it.
        proposers: who proposed it, in member order.
        ends: its last node by member; absent where it does not fit the member's window.
        exact: members whose tokens decode to exactly the text. Others cannot score it.
        starts: the node that it follows, by member; absent for the root.
    """

    def __init__(self, text: str, stops: bool, starts: Mapping[Member, Node] | None = None) -> None:
        self.text = text
        self.stops = stops
        self.starts = starts or {}
        self.proposers: list[Member] = []
        self.ends: dict[Member, Node] = {}
        self.exact: set[Member] = set()

    def terms(self, member: Member) -> int:
        """How many log-probabilities the mean of `nll` is over; 0 if there are none."""
        if member not in self.exact:
            return 0
        return len(self.path(member)) + self.stops

    def path(self, member: Member) -> list[Node]:
        """The nodes of the span at a member that has placed it."""
        root = member.tree.root
        before = self.starts.get(member, root).length - root.length
        return member.tree.path(self.ends[member])[before:]

    def nll(self, member: Member) -> float:
        """Mean negative log-likelihood per token in nats (equation 5); a stop adds the term
        -log of the end-of-sequence mass. Infinite if the member cannot score the span.
        """
        if member not in self.exact:
            return math.inf
        terms = [node.logprob for node in self.path(member)]
        if self.stops:
            terms.append(member.next(self.ends[member]).end_logprob)
        known = [term for term in terms if term is not None]
        assert len(known) == len(terms), "scored before it was evaluated"
        return 0.0 - math.fsum(known) / len(known) if known else math.inf


class Pool:
    """The union of the members' proposals, in member order, then branch order.

    Args:
        first_word: whether the response is still empty. Leading whitespace then does not tell
            candidates apart, and every member is fed the leading whitespace that it wrote itself.
        starts: the node that spans follow, by member; absent for the root.
    """

    def __init__(self, *, first_word: bool, starts: Mapping[Member, Node] | None = None) -> None:
        self.candidates: list[PoolCandidate] = []
        self._starts = starts or {}
        self._first_word = first_word
        self._found: dict[tuple[str, bool], PoolCandidate] = {}
        self._leading: dict[Member, str] = {}

    def add(self, member: Member, proposal: Proposal) -> PoolCandidate:
        """Take in a member's spans; returns the candidate that its likeliest one belongs to. Of
        two spans of one member with the same text, the tokens of the earlier, likelier one count.
        """
        before = member.text(self._start(member))
        texts = [added(before, member.text(span.node)) for span in proposal.spans]
        if self._first_word and texts[0].strip():
            self._leading[member] = leading_space(texts[0])
        for span, text in zip(proposal.spans, texts, strict=True):
            candidate = self.suggest(text, stops=span.stops)
            if member not in candidate.proposers:
                candidate.proposers.append(member)
                candidate.ends[member] = span.node
                candidate.exact.add(member)
        return self._found[self._key(texts[0], proposal.spans[0].stops)]

    def suggest(self, text: str, *, stops: bool = False) -> PoolCandidate:
        """The candidate of a text, which nobody needs to have proposed."""
        key = self._key(text, stops)
        if key not in self._found:
            self._found[key] = PoolCandidate(text, stops, self._starts)
            self.candidates.append(self._found[key])
        return self._found[key]

    def find(self, candidate: PoolCandidate) -> PoolCandidate:
        """This pool's candidate for one of another pool that took in the same spans."""
        return self._found[self._key(candidate.text, candidate.stops)]

    def read(self, member: Member, likely: Callable[[PoolCandidate], bool]) -> Steps[None]:
        """Have a member score every candidate of the pool, in one pass.

        What follows a candidate is evaluated, too, where that is `likely` to win: the next round
        begins there.
        """
        nodes: list[Node] = []
        ends: list[Node] = []
        for candidate in self.candidates:
            end = self.place(member, candidate)
            if end is not None:
                line = [self._start(member), *candidate.path(member)]
                needed = candidate.stops or likely(candidate)
                nodes += line if needed else line[:-1]
                ends.append(end)
        yield from member.evaluate(nodes, ends)

    def place(self, member: Member, candidate: PoolCandidate) -> Node | None:
        """A candidate's last node at a member; None if the member cannot score it."""
        if member not in candidate.ends:
            self._place(member, candidate)
        return candidate.ends[member] if member in candidate.exact else None

    def expect(self, member: Member) -> None:
        """Take it that a member's spans will begin with the whitespace that its likeliest first
        token begins with.
        """
        root = member.tree.root
        if not self._first_word or member in self._leading or root.next is None:
            return
        if root.next.greedy not in member.end_ids:
            first = member.tree.child(root, root.next.greedy)
            self._leading[member] = leading_space(member.text(first))

    def _start(self, member: Member) -> Node:
        return self._starts.get(member, member.tree.root)

    def _key(self, text: str, stops: bool) -> tuple[str, bool]:
        return text.lstrip() if self._first_word else text, stops

    def _place(self, member: Member, candidate: PoolCandidate) -> None:
        text = candidate.text
        if member in self._leading:
            text = self._leading[member] + text.lstrip()
        placed = member.place(text, self._start(member))
        if placed is not None:
            candidate.ends[member], exact = placed
            if exact:
                candidate.exact.add(member)


def fuse(nll: Sequence[float], weights: Sequence[float]) -> float | None:
    """Fused score F (equation 6): weighted mean over the members whose NLL is finite; None if
    none of them has weight.
    """
    scored = [(w, value) for w, value in zip(weights, nll, strict=True) if math.isfinite(value)]
    total = math.fsum(w for w, _ in scored)
    return math.fsum(w * value for w, value in scored) / total if total > 0 else None
