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
        node: the last node of the span. A span that only ends the response has no tokens. Its
            `node` is the node before the span.
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
    """Propose up to M words, and stop at the first word of which the member is not confident.

    The member is confident of a word if Δ >= τ at the start of the word (equation 1). It proposes B
    alternatives for the word of which it is not confident. The alternatives start with the B
    likeliest tokens (equation 2) and grow greedily (equation 3).
    """
    end = member.tree.root
    margins: list[float] = []
    for _ in range(config.max_words):
        yield from member.evaluate([end])
        if member.is_full(end):
            break
        margins.append(member.next(end).margin)
        confident = margins[-1] >= config.margin_threshold
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
    tokens = member.next(start).branches(branches)
    first = {
        token: member.tree.child(start, token) for token in tokens if token not in member.end_ids
    }
    last = yield from finish_words(
        member,
        start,
        list(first.values()),
        limit=config.max_word_tokens,
        letters=config.max_word_letters,
    )
    ends = dict(zip(first, last, strict=True))
    return [
        Span(ends[token], ends=False) if token in ends else Span(start, ends=True)
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
    """Grow one word from each first token, and return the last nodes. The words share passes.

    Args:
        member: the member.
        start: the node before the words.
        firsts: the first node of each word.
        follow: returns the next token of the word with an index, after its last node, which is
            evaluated. Default: the token that the member writes.
        limit: maximum number of tokens in a word.
        letters: maximum number of letters of scripts without spaces in a word.
    """
    before = member.text(start)
    ends = list(firsts)
    texts = [words.added(before, member.text(end)) for end in ends]
    growing = list(range(len(ends)))

    def is_open(index: int) -> bool:
        size = ends[index].length - start.length
        return not (words.is_closed(texts[index], size, limit) or member.is_full(ends[index]))

    while growing := [index for index in growing if is_open(index)]:
        yield from member.evaluate(ends[i] for i in growing)
        for i in list(growing):
            token = follow(i, ends[i]) if follow else member.next(ends[i]).chosen
            if token in member.end_ids:
                growing.remove(i)
                continue
            longer = member.tree.child(ends[i], token)
            text = words.added(before, member.text(longer))
            if words.ends_before(texts[i], text, letters):
                growing.remove(i)
            else:
                ends[i], texts[i] = longer, text
    return ends
