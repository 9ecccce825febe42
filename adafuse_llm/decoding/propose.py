"""The proposal of a member in a round (§3.2, §3.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.member import MemberState, Steps
from adafuse_llm.text import words
from adafuse_llm.tree.tokens import Node


@dataclass(frozen=True, slots=True)
class Span:
    """A path in a member's tree that the member proposes.

    Attributes:
        node: the last node of the span, or the node before a span that only ends the response.
        ends: whether the response ends after the span.
    """

    node: Node
    ends: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """The spans of one member in branch order, and the margin Δ at the start of each word."""

    spans: tuple[Span, ...]
    margins: tuple[float, ...]


def propose(member: MemberState, config: AdaFuseConfig) -> Steps[Proposal]:
    """Propose up to M words, and stop at the first one of which the member is not confident.

    The member is confident of a word if Δ >= τ at its start (equation 1). Otherwise it proposes
    alternatives, which start with the B likeliest tokens (equation 2) and grow greedily (equation
    3).
    """
    end = member.tree.root
    margins: list[float] = []
    for _ in range(config.max_words):
        # how sure is the member of its next word?
        yield from member.evaluate([end])
        if member.is_full(end):
            break
        margins.append(member.next(end).margin)
        confident = margins[-1] >= config.margin_threshold
        # one word or several alternatives, each grown to its end
        branches = 1 if confident else config.branches
        spans = yield from branch(member, end, branches, config)
        if not confident or spans[0].ends:
            return Proposal(tuple(spans), tuple(margins))
        end = spans[0].node
    return Proposal((Span(end, ends=False),), tuple(margins))


def branch(
    member: MemberState, start: Node, branches: int, config: AdaFuseConfig
) -> Steps[list[Span]]:
    """Return one span of one word after `start` for each of the `branches` likeliest tokens."""
    # a branch that ends the response grows no word
    tokens = member.next(start).branches(branches)
    firsts = [member.tree.child(start, token) for token in tokens if token not in member.end_ids]
    lasts = yield from finish_words(
        member, start, firsts, limit=config.max_word_tokens, letters=config.max_word_letters
    )
    ends = iter(lasts)
    return [
        Span(start, ends=True) if token in member.end_ids else Span(next(ends), ends=False)
        for token in tokens
    ]


def finish_words(
    member: MemberState,
    start: Node,
    firsts: Sequence[Node],
    follow: Callable[[int, Node], int] | None = None,
    *,
    limit: int,
    letters: int,
) -> Steps[list[Node]]:
    """Grow a word from each of the nodes `firsts` after `start`, and return the last nodes.

    All words grow in the same passes. A word has at most `limit` tokens, and `letters` letters of
    scripts without spaces. `follow` gets the index of a word and its evaluated last node, and
    returns the token that the word takes next: by default, the one that the member writes.
    """
    before = member.text(start)
    ends = list(firsts)
    texts = [words.added(before, member.text(end)) for end in ends]

    def waits(index: int) -> bool:
        # let a word grow, and return whether its last node must be evaluated before it grows on
        while True:
            end, text = ends[index], texts[index]
            if words.is_closed(text, end.length - start.length, limit) or member.is_full(end):
                return False
            if end.next is None:
                return True
            token = follow(index, end) if follow else end.next.chosen
            if token in member.end_ids:
                return False
            # the word takes the token, unless the word ends before it
            longer = member.tree.child(end, token)
            extended = words.added(before, member.text(longer))
            if words.ends_before(text, extended, letters):
                return False
            ends[index], texts[index] = longer, extended

    growing: Sequence[int] = range(len(ends))
    while growing := [index for index in growing if waits(index)]:
        yield from member.evaluate([ends[index] for index in growing])
    return ends
