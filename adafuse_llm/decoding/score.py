"""The pool of a round, and the members' scores of the candidates in the pool (§3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adafuse_llm import results
from adafuse_llm.decoding.member import MemberState, Steps, in_lockstep
from adafuse_llm.decoding.propose import Proposal
from adafuse_llm.errors import DecodingError
from adafuse_llm.text.codec import difference
from adafuse_llm.text.opening import Opening
from adafuse_llm.text.words import leading_space
from adafuse_llm.tree.tokens import Node


@dataclass(eq=False)
class PoolCandidate:
    """A candidate of the pool, with its nodes in each member's tree.

    Attributes:
        text: the text, as its first proposer wrote it.
        shown: the part of the text that belongs to the response.
        ends: whether the response ends after the text.
        proposers: the members that proposed the candidate, in member order.
        nodes: the candidate's last node in each member's tree. A member is absent if it has not
            encoded the text, or has no room for it in its context window.
        exact: members whose tokens decode to exactly the text. Others cannot score it.
    """

    text: str
    shown: str
    ends: bool
    proposers: list[MemberState] = field(default_factory=list)
    nodes: dict[MemberState, Node] = field(default_factory=dict)
    exact: set[MemberState] = field(default_factory=set)

    def terms(self, member: MemberState) -> int:
        """Return the number of terms in the mean `nll`, or 0 if the member cannot score it."""
        if member not in self.exact:
            return 0
        return self.nodes[member].length - member.tree.root.length + self.ends

    def path(self, member: MemberState) -> Sequence[Node]:
        """Return the candidate's nodes in a member's tree. The member must be in `nodes`."""
        return member.tree.path(self.nodes[member])

    def nll(self, member: MemberState, logprob: float | None = None) -> float:
        """Return the mean NLL per token in nats (equation 4). If `logprob` is known, pass it."""
        logprob = self.logprob(member) if logprob is None else logprob
        return 0.0 - logprob / max(1, self.terms(member))

    def logprob(self, member: MemberState) -> float:
        """Return a candidate's log-likelihood in nats; -infinity if the member cannot score it.

        It includes the end of the response if the candidate has it.
        """
        if member not in self.exact:
            return -math.inf
        # the tokens, and the end if it follows
        path, start = self.path(member), member.tree.root
        known = [node.logprob for node in path if node.logprob is not None]
        assert len(known) == len(path), "the candidate is not evaluated"
        if self.ends:
            known.append(member.next(self.nodes[member]).end_logprob)
        # forced tokens are certain
        if member.grammar is not None:
            for place, before in enumerate([start, *path][: len(known)]):
                if member.permits.is_forced(before):
                    known[place] = 0.0
                elif before is start:  # only what the grammar permits can begin a candidate
                    known[place] -= member.next(start).mass
        return math.fsum(known) if known else -math.inf


class Pool:
    """The union of the members' proposals, ordered by member and then by branch.

    >>> pool = Pool(Opening(is_reply=True))
    >>> pool.suggest(" Blue", ends=False) is pool.suggest("Blue", ends=False)
    True

    At the start of a reply, texts that differ only in leading whitespace are one candidate, and
    each member reads it with the leading whitespace of its own proposal.
    """

    def __init__(self, opening: Opening) -> None:
        self.candidates: list[PoolCandidate] = []
        self._members: dict[MemberState, None] = {}
        self._opening = opening
        self._by_key: dict[tuple[str, bool], PoolCandidate] = {}
        self._leading: dict[MemberState, str] = {}

    def add(self, member: MemberState, proposal: Proposal) -> PoolCandidate:
        """Add a member's spans, and return the candidate of the first one."""
        self._members[member] = None
        texts = [member.opening.from_tree_text(member.text(span.node)) for span in proposal.spans]
        # a member keeps the whitespace with which it begins a reply
        if self._opening.is_reply and texts[0].strip():
            self._leading[member] = leading_space(texts[0])
        candidates = [
            self.suggest(text, ends=span.ends)
            for span, text in zip(proposal.spans, texts, strict=True)
        ]
        for span, candidate in zip(proposal.spans, candidates, strict=True):
            if member not in candidate.proposers:  # of equal texts, keep the first
                candidate.proposers.append(member)
                candidate.nodes[member] = span.node
                candidate.exact.add(member)
        return candidates[0]

    def suggest(self, text: str, *, ends: bool) -> PoolCandidate:
        """Return the candidate with this text. If the pool does not have it, add it first."""
        key = (text.lstrip() if self._opening.is_reply else text, ends)
        if key not in self._by_key:
            self._by_key[key] = PoolCandidate(text, self._opening.visible(text), ends)
            self.candidates.append(self._by_key[key])
        return self._by_key[key]

    def cut(self, candidate: PoolCandidate) -> PoolCandidate:
        """Return a candidate, or its longest prefix that fits.

        A prefix ends at a token of the first proposer, but not inside a character. It may be empty.
        """
        if self.fits(candidate):
            return candidate
        proposer = candidate.proposers[0]
        for node in reversed(candidate.path(proposer)[:-1]):
            if proposer.room(node) < 0:  # too long, so skip the tokenizers
                continue
            text = proposer.opening.from_tree_text(proposer.text(node))
            if candidate.text.startswith(text):  # the text does not end inside a character
                prefix = PoolCandidate(text, self._opening.visible(text), ends=False)
                prefix.nodes[proposer] = node
                for member in self._members:
                    self.encode(member, prefix)
                if self.fits(prefix):
                    return prefix
        # the empty text fits every limit
        prefix = PoolCandidate("", "", ends=False)
        prefix.nodes = {member: member.tree.root for member in self._members}
        return prefix

    def fits(self, candidate: PoolCandidate) -> bool:
        """Return whether a candidate is within every member's limit of tokens.

        Under a grammar, it must also end with a whole character.
        """
        return all(
            member.room(end) >= 0 and member.permits.is_whole(end)
            for member, end in candidate.nodes.items()
        )

    def read(
        self, member: MemberState, may_win: Callable[[PoolCandidate], bool] | None = None
    ) -> Steps[None]:
        """Score every candidate of the pool with a member, in one query.

        `may_win` returns whether the pass also evaluates the candidate's last node, because the
        next round may begin there. It is None if no round follows.
        """
        nodes: list[Node] = []
        scored: list[Node] = []
        for candidate in self.candidates:
            end = self.encode(member, candidate)
            if end is None:
                continue
            path = candidate.path(member)
            scored += path
            nodes += [member.tree.root, *(path[:-1] if may_win else ())]
            if candidate.ends or (may_win and may_win(candidate)):
                nodes.append(end)
        yield from member.evaluate(nodes, dict.fromkeys(scored))

    def encode(self, member: MemberState, candidate: PoolCandidate) -> Node | None:
        """Return a candidate's last node in a member's tree; None if the member cannot score it."""
        self._members[member] = None
        if member not in candidate.nodes:
            encoded = member.encode(self.written(member, candidate.text))
            if encoded is not None:
                candidate.nodes[member], exact = encoded
                if exact:
                    candidate.exact.add(member)
        return candidate.nodes[member] if member in candidate.exact else None

    def why_missing(self, member: MemberState, candidate: PoolCandidate) -> str:
        """Return why a member has no finite NLL of a candidate."""
        if member not in candidate.nodes:
            return "its context window has no room for the text"
        if member in candidate.exact:
            return "it gives the text a probability of 0"
        read = member.text(candidate.nodes[member])
        change = difference(self.written(member, candidate.text), read)
        return f"its tokenizer cannot write the text: {change}"

    def expect(self, members: Sequence[MemberState]) -> Steps[None]:
        """Find the whitespace with which each member would begin a reply. `written` adds it."""
        if not self._opening.is_reply:
            return
        yield from in_lockstep([member.evaluate([member.tree.root]) for member in members])
        for member in members:
            token = member.next(member.tree.root).chosen
            if token not in member.end_ids:
                first = member.tree.child(member.tree.root, token)
                self._leading[member] = leading_space(member.text(first))

    def written(self, member: MemberState, text: str) -> str:
        """Return the text of a candidate as a member writes it into its tree."""
        if member in self._leading and text.strip():
            return self._leading[member] + text.lstrip()
        return member.opening.tree_text(text)


Scorer = Callable[[PoolCandidate, Sequence[MemberState]], results.Candidate]
"""A function that scores a candidate that the members have read."""


def score(candidate: PoolCandidate, members: Sequence[MemberState]) -> results.Candidate:
    """Return a candidate with every member's NLL, and with the fused score and log-probability."""
    weights = [member.weight for member in members]
    logprobs = [candidate.logprob(member) for member in members]
    nll = [candidate.nll(*pair) for pair in zip(members, logprobs, strict=True)]
    return to_result(candidate, members, nll, fuse(nll, weights), fuse(logprobs, weights))


def fuse(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the weighted mean of the finite values. The mean of NLLs is the score F (equation 5).

    None if no member with a finite value has a weight above 0.
    """
    finite = [(w, value) for w, value in zip(weights, values, strict=True) if math.isfinite(value)]
    total = math.fsum(w for w, _ in finite)
    return math.fsum(w * value for w, value in finite) / total if total > 0 else None


def to_result(
    candidate: PoolCandidate,
    members: Sequence[MemberState],
    nll: Sequence[float],
    score: float | None,
    logprob: float | None = None,
) -> results.Candidate:
    """Return a candidate as a result, with the finite NLLs only.

    If `logprob` is set, `Response.count` computes the log-likelihood of every member with an NLL.
    """
    return results.Candidate(
        text=candidate.shown,
        ends=candidate.ends,
        proposers=tuple(member.name for member in candidate.proposers),
        nll={m.name: value for m, value in zip(members, nll, strict=True) if math.isfinite(value)},
        score=score,
        logprob=logprob,
    )


def best_candidate(scored: Sequence[results.Candidate]) -> int:
    """Return the index of the first candidate with the lowest score.

    Raises:
        DecodingError: no candidate has a score.
    """
    scores = [(c.score, index) for index, c in enumerate(scored) if c.score is not None]
    if not scores:
        raise DecodingError(
            "no member with a weight above 0 can score any candidate of the round "
            f"({', '.join(repr(c.text) for c in scored)}): every log-likelihood is infinite. "
            "Check the members' logits, or give a weight above 0 to a member that can score."
        )
    return min(scores)[1]
