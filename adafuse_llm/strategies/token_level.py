"""Common parts of the strategies that choose token by token.

Members have different vocabularies, so a token stands for its text: the others are asked about,
and continue with, their own tokens for that text. A token that ends inside a UTF-8 character is
completed greedily, as words are. Any of a member's end-of-sequence tokens stands for one and the
same candidate, whose probability is their sum. At the start of the response leading whitespace
does not tell candidates apart, as for words.
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
"""Tokens among which a member's own one for a text is looked for."""


def offer(member: Member, count: int) -> Steps[Proposal]:
    """A member's likeliest next tokens as spans."""
    root = member.tree.root
    yield from member.evaluate([root])
    return (yield from offer_tokens(member, member.next(root).tokens[:count]))


def offer_tokens(member: Member, tokens: Sequence[int]) -> Steps[Proposal]:
    """Tokens that may come next as spans."""
    root = member.tree.root
    starts = {t: member.tree.child(root, t) for t in tokens if t not in member.end_ids}
    ends = yield from _complete(member, list(starts.values()))
    found = dict(zip(starts, ends, strict=True))
    spans = [Span(found.get(t, root), stops=t not in found) for t in tokens]
    return Proposal(tuple(spans), (member.next(root).margin,))


def _complete(member: Member, starts: Sequence[Node]) -> Steps[list[Node]]:
    """Tokens extended greedily up to where a character ends; returns their last nodes."""
    ends = list(starts)
    growing = list(range(len(ends)))
    for _ in range(CHARACTER_TOKENS):
        growing = [
            i
            for i in growing
            if is_incomplete(member.text(ends[i])) and not member.is_full(ends[i])
        ]
        yield from member.evaluate(ends[i] for i in growing)
        growing = [i for i in growing if member.next(ends[i]).greedy not in member.end_ids]
        for i in growing:
            ends[i] = member.tree.child(ends[i], member.next(ends[i]).greedy)
    return ends


def union(members: Sequence[Member], proposals: Sequence[Proposal], *, first_word: bool) -> Pool:
    """The pool of what members offer."""
    pool = Pool(first_word=first_word)
    for member, proposal in zip(members, proposals, strict=True):
        pool.add(member, proposal)
    return pool


def suggest(member: Member, pool: Pool, count: int) -> Steps[None]:
    """Add the texts of the member's likeliest tokens, as far as they are whole characters."""
    root = member.tree.root
    yield from member.widen(root, count)
    for token in member.next(root).tokens[:count]:
        text = member.text(member.tree.child(root, token))
        if token not in member.end_ids and not is_incomplete(text):
            pool.suggest(text)


def first_logprobs(
    members: Sequence[Member], pool: Pool, *, whole: bool = False
) -> Steps[list[list[float]]]:
    """For every member, the natural log of the probability that it goes on with each candidate.

    That is the probability of the member's first token for it: its own token if it offered the
    candidate, else the first of its encoding; minus infinity where it cannot write the text.

    Args:
        members: who is asked; their roots have been evaluated.
        pool: the candidates.
        whole: ask about single tokens only: an encoding of several has probability zero.
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
            member.next(member.tree.root).end_logprob if candidate.stops else _logprob(node)
            for candidate, node in zip(pool.candidates, row, strict=True)
        ]
        for member, row in zip(members, nodes, strict=True)
    ]


def _first(member: Member, pool: Pool, candidate: PoolCandidate, *, whole: bool) -> Node | None:
    if candidate.stops:
        candidate.ends.setdefault(member, member.tree.root)
        return None
    end = pool.place(member, candidate)
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
    """Candidates scored with -log of the weighted average of the members' probabilities.

    Args:
        members: who has been asked.
        candidates: about what.
        logprobs: natural logs, [member, candidate].
    """
    weights = [member.weight for member in members]
    scored = []
    for candidate, *logs in zip(candidates, *logprobs, strict=True):
        shares = (w * math.exp(each) for w, each in zip(weights, logs, strict=True))
        average = math.fsum(shares) / math.fsum(weights)
        score = 0.0 - math.log(average) if average > 0 else None
        scored.append(to_result(candidate, members, [0.0 - each for each in logs], score))
    return scored
