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

from adafuse_llm import results
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal, Span
from adafuse_llm.decoding.rounds import to_result
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.text.words import CHARACTER_TOKENS, is_incomplete
from adafuse_llm.tree import Node

LISTED = 10
"""Number of likeliest next tokens that each member lists."""


def offer(member: Member, count: int) -> Steps[Proposal]:
    """Return a member's `count` likeliest next tokens as spans."""
    root = member.tree.root
    yield from member.evaluate([root])
    return (yield from offer_tokens(member, member.next(root).tokens[:count]))


def offer_tokens(
    member: Member, tokens: Sequence[int], start: Node | None = None
) -> Steps[Proposal]:
    """Return the given next tokens of a member as spans.

    Args:
        member: the member.
        tokens: the tokens.
        start: the evaluated node before the tokens. Default: the last committed token.
    """
    root = start or member.tree.root
    starts = {t: member.tree.child(root, t) for t in tokens if t not in member.end_ids}
    ends = yield from _complete(member, list(starts.values()))
    by_token = dict(zip(starts, ends, strict=True))
    spans = [Span(by_token.get(t, root), stops=t not in by_token) for t in tokens]
    return Proposal(tuple(spans), (member.next(root).margin,))


def _complete(member: Member, starts: Sequence[Node]) -> Steps[list[Node]]:
    """Extend each token greedily to the end of its last character. Return the last nodes."""
    ends = list(starts)
    growing = list(range(len(ends)))
    for _ in range(CHARACTER_TOKENS):
        growing = [
            i
            for i in growing
            if is_incomplete(member.text(ends[i])) and not member.is_full(ends[i])
        ]
        yield from member.evaluate(ends[i] for i in growing)
        growing = [i for i in growing if member.next(ends[i]).chosen not in member.end_ids]
        for i in growing:
            ends[i] = member.tree.child(ends[i], member.next(ends[i]).chosen)
    return ends


def union(members: Sequence[Member], proposals: Sequence[Proposal]) -> Pool:
    """Return the pool of the members' proposals."""
    pool = Pool(members[0].opening)
    for member, proposal in zip(members, proposals, strict=True):
        pool.add(member, proposal)
    return pool


def normalized_union(
    members: Sequence[Member], top_k: int
) -> Steps[tuple[Pool, list[list[float]], dict[str, tuple[float, ...]]]]:
    """Return UniTE's union of the members' `top_k` likeliest next tokens.

    Returns:
        The union. Natural logs of the members' probabilities of its candidates, normalized over the
        union, [member, candidate]. The members' margins, by member name.
    """
    proposals = yield from in_lockstep([offer(member, top_k) for member in members])
    pool = union(members, proposals)
    logprobs = yield from first_logprobs(members, pool)
    margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
    return pool, [_normalized(row) for row in logprobs], margins


def _normalized(logprobs: Sequence[float]) -> list[float]:
    """Shift log-probabilities so that the probabilities sum to one."""
    highest = max(logprobs)
    total = highest + math.log(math.fsum(math.exp(value - highest) for value in logprobs))
    return [value - total for value in logprobs]


def suggest(member: Member, pool: Pool, count: int) -> Steps[None]:
    """Add the texts of a member's likeliest tokens to the pool, if they are whole characters."""
    root = member.tree.root
    yield from member.widen(root, count)
    for token in member.next(root).tokens[:count]:
        text = member.text(member.tree.child(root, token))
        if token not in member.end_ids and not is_incomplete(text):
            pool.suggest(text)


def first_logprobs(
    members: Sequence[Member], pool: Pool, *, whole: bool = False
) -> Steps[list[list[float]]]:
    """Return the natural log of each member's probability of each candidate, [member, candidate].

    Under a grammar, probabilities are normalized over the permitted tokens.

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
    masses = [member.mass(member.tree.root) for member in members]
    return [
        [
            (member.next(member.tree.root).end_logprob if candidate.stops else _logprob(node))
            - mass
            for candidate, node in zip(pool.candidates, row, strict=True)
        ]
        for member, row, mass in zip(members, nodes, masses, strict=True)
    ]


def _first(member: Member, pool: Pool, candidate: PoolCandidate, *, whole: bool) -> Node | None:
    if candidate.stops:
        candidate.ends.setdefault(member, member.tree.root)
        return None
    end = pool.encode(member, candidate)
    path = member.tree.path(end) if end is not None else []
    if not path or (whole and len(path) > 1 and member not in candidate.proposers):
        return None
    return path[0]


def _logprob(node: Node | None) -> float:
    return -math.inf if node is None or node.logprob is None else node.logprob


def averaged(
    members: Sequence[Member],
    candidates: Sequence[PoolCandidate],
    logprobs: Sequence[Sequence[float]],
) -> list[results.Candidate]:
    """Score candidates with -log of the weighted average of the members' probabilities.

    Args:
        members: the members.
        candidates: the candidates.
        logprobs: natural logs of the probabilities, [member, candidate].
    """
    weights = [member.weight for member in members]
    values = [
        math.fsum(w * math.exp(log) for w, log in zip(weights, logs, strict=True))
        / math.fsum(weights)
        for logs in zip(*logprobs, strict=True)
    ]
    return scored_by(members, candidates, logprobs, values)


def scored_by(
    members: Sequence[Member],
    candidates: Sequence[PoolCandidate],
    logprobs: Sequence[Sequence[float]],
    values: Sequence[float],
) -> list[results.Candidate]:
    """Score candidates with -log of a value. A candidate with the value 0 has no score.

    Args:
        members: the members.
        candidates: the candidates.
        logprobs: natural logs of the probabilities, [member, candidate].
        values: the fused value of each candidate.
    """
    return [
        to_result(
            candidate,
            members,
            [0.0 - log for log in logs],
            0.0 - math.log(value) if value > 0 else None,
        )
        for candidate, value, *logs in zip(candidates, values, *logprobs, strict=True)
    ]
