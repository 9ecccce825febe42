"""Common parts of the strategies that choose token by token.

Members have different vocabularies, so the text of a token is the candidate. The other members
score this text with their own tokens, and commit these tokens if the text wins. A token that ends
inside a UTF-8 character is completed greedily, like a word. All end-of-sequence tokens of a member
are one candidate, whose probability is the sum of theirs. At the start of a reply to messages,
texts that differ only in leading whitespace are one candidate, as in strategies that choose words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from adafuse_llm import Candidate
from adafuse_llm.backends import Node
from adafuse_llm.strategies import (
    MemberState,
    Pool,
    PoolCandidate,
    Proposal,
    Span,
    Steps,
    in_lockstep,
    to_result,
)

LISTED = 10
"""Number of likeliest next tokens that each member lists."""

CHARACTER_TOKENS = 3
"""Maximum number of tokens that complete a character."""

UNFINISHED = "\ufffd"
"""What a codec writes in place of an incomplete character at the end of a text."""

Margins = dict[str, tuple[float, ...]]
"""The margins of each member, by its name."""


def offer(member: MemberState, count: int) -> Steps[Proposal]:
    """Return a member's `count` likeliest next tokens as spans."""
    root = member.tree.root
    yield from member.evaluate([root])
    return (yield from offer_tokens(member, member.next(root).tokens[:count]))


def offer_tokens(member: MemberState, tokens: Sequence[int]) -> Steps[Proposal]:
    """Return the given next tokens of a member as spans, each up to the end of its character."""
    root = member.tree.root
    starts = {t: member.tree.child(root, t) for t in tokens if t not in member.end_ids}
    ends = list(starts.values())
    growing = list(range(len(ends)))
    for _ in range(CHARACTER_TOKENS):
        growing = [
            i
            for i in growing
            if member.text(ends[i]).endswith(UNFINISHED) and not member.is_full(ends[i])
        ]
        yield from member.evaluate(ends[i] for i in growing)
        growing = [i for i in growing if member.next(ends[i]).chosen not in member.end_ids]
        for i in growing:
            ends[i] = member.tree.child(ends[i], member.next(ends[i]).chosen)
    by_token = dict(zip(starts, ends, strict=True))
    spans = [Span(by_token.get(t, root), ends=t not in by_token) for t in tokens]
    return Proposal(tuple(spans), (member.next(root).margin,))


def union(members: Sequence[MemberState], proposals: Sequence[Proposal]) -> tuple[Pool, Margins]:
    """Return the pool of the members' proposals, and the members' margins."""
    pool = Pool(members[0].opening)
    for member, proposal in zip(members, proposals, strict=True):
        pool.add(member, proposal)
    return pool, {m.name: p.margins for m, p in zip(members, proposals, strict=True)}


def first_logprobs(
    members: Sequence[MemberState], pool: Pool, *, whole: bool = False
) -> Steps[list[list[float]]]:
    """Return the natural log of each member's probability of each candidate, [member, candidate].

    This is the probability of the member's first token for the candidate. If the member proposed
    the candidate, this is the token that it proposed. Otherwise, it is the first token of its
    encoding of the text. The value is minus infinity if the member cannot write the text.

    Args:
        members: the members, whose roots are evaluated.
        pool: the candidates.
        whole: whether the probability is zero if the member encodes the text in several tokens.
    """
    nodes = [[_first(m, pool, c, whole=whole) for c in pool.candidates] for m in members]
    yield from in_lockstep(
        [
            member.evaluate((), [node for node in row if node is not None])
            for member, row in zip(members, nodes, strict=True)
        ]
    )
    return [
        [
            member.next(member.tree.root).end_logprob if candidate.ends else _logprob(node)
            for candidate, node in zip(pool.candidates, row, strict=True)
        ]
        for member, row in zip(members, nodes, strict=True)
    ]


def _first(
    member: MemberState, pool: Pool, candidate: PoolCandidate, *, whole: bool
) -> Node | None:
    if candidate.ends:
        candidate.nodes.setdefault(member, member.tree.root)
        return None
    end = pool.encode(member, candidate)
    path = member.tree.path(end) if end is not None else []
    if not path or (whole and len(path) > 1 and member not in candidate.proposers):
        return None
    return path[0]


def _logprob(node: Node | None) -> float:
    return -math.inf if node is None or node.logprob is None else node.logprob


def averaged(
    members: Sequence[MemberState],
    candidates: Sequence[PoolCandidate],
    logprobs: Sequence[Sequence[float]],
) -> list[Candidate]:
    """Score candidates with -log of the weighted average of the members' probabilities.

    A candidate with an average of 0 has no score.

    Args:
        members: the members.
        candidates: the candidates.
        logprobs: natural logs of the probabilities, [member, candidate].
    """
    weights = [member.weight for member in members]
    scored = []
    for candidate, *logs in zip(candidates, *logprobs, strict=True):
        mean = math.fsum(w * math.exp(log) for w, log in zip(weights, logs, strict=True))
        score = 0.0 - math.log(mean / math.fsum(weights)) if mean > 0 else None
        scored.append(to_result(candidate, members, [0.0 - log for log in logs], score))
    return scored
