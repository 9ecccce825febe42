"""The token tree: tokens that one member evaluates after the committed text of a request.

A node is one token. Algorithm 1 needs two facts about a node: its log-probability given the tokens
before it, and the distribution of the token after it. A backend computes both for many nodes at a
time, and the tree stores them. Committing a span makes its last token the new root. The nodes below
the new root stay valid, and the tree drops all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from adafuse_llm.tree.adjustment import Adjustment, Changes
from adafuse_llm.tree.sampling import Draw


@dataclass(frozen=True, slots=True)
class Next:
    """Summary of a member's next-token distribution p.

    Attributes:
        tokens: ids of the most likely tokens that ``Node.allowed`` permits, in descending order of
            probability. If two probabilities are equal, the lower id comes first.
        logprobs: natural logarithms of their probabilities.
        end_logprob: natural logarithm of the total probability of the member's end-of-sequence
            ids.
        mass: natural logarithm of the total probability of all tokens that ``Node.allowed``
            permits.
        drawn: the token that ``Node.draw`` draws; None if the node has no draw.
        word_end_logprob: natural logarithm of the total probability of the permitted tokens that
            begin with whitespace or end the sequence; None if the query does not ask for it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    end_logprob: float
    mass: float = 0.0
    drawn: int | None = None
    word_end_logprob: float | None = None

    @property
    def values(self) -> tuple[float, ...]:
        """All log-probabilities except `mass`."""
        ends = () if self.word_end_logprob is None else (self.word_end_logprob,)
        return *self.logprobs, self.end_logprob, *ends

    @property
    def chosen(self) -> int:
        """The token that the member writes: the drawn token, or the most likely one."""
        return self.tokens[0] if self.drawn is None else self.drawn

    def branches(self, count: int) -> tuple[int, ...]:
        """Return up to `count` of the likeliest tokens, which begin alternatives (equation 2).

        If a token is drawn, it is the only one.
        """
        return self.tokens[:count] if self.drawn is None else (self.drawn,)

    @property
    def margin(self) -> float:
        """The margin Δ = p(1) - p(2) (equation 1), or p(1) if only one token is listed.

        If ``Node.allowed`` restricts the tokens, p is normalized over the permitted tokens.
        """
        second = math.exp(self.logprobs[1] - self.mass) if len(self.logprobs) > 1 else 0.0
        return math.exp(self.logprobs[0] - self.mass) - second


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """One token of a member's tree.

    Attributes:
        token: the token's id.
        parent: the node of the token before this one; None for the root.
        length: number of tokens from the start of the prompt to this one (position + 1).
        logprob: natural logarithm of the token's probability given the tokens before it; None
            until it is known.
        next: summary of the distribution of the next token; None until the node is evaluated.
        allowed: the tokens that may follow this one, as a bit mask; None if all may follow. Bit
            ``i % 8`` of byte ``i // 8`` stands for token ``i``, where bit 0 is the lowest bit.
            Tokens beyond the mask may not follow. Log-probabilities do not depend on the mask.
        draw: how to draw the token after this one; None to draw nothing. Log-probabilities do not
            depend on it.
        children: the nodes of the tokens after this one, by token id.
        line: the path to this node that `TokenTree.path` computed last; empty if it kept none.
    """

    token: int
    parent: Node | None
    length: int
    logprob: float | None = None
    next: Next | None = None
    allowed: bytes | None = None
    draw: Draw | None = None
    children: dict[int, Node] = field(default_factory=dict)
    line: tuple[Node, ...] = ()

    def __repr__(self) -> str:
        return f"Node({self.token}, length={self.length})"


MAX_LINE = 64
"""A node keeps a path (`Node.line`) of up to this many nodes, so long texts take little memory."""


def is_allowed(mask: bytes, token: int) -> bool:
    """Return whether a mask, in the format of ``Node.allowed``, permits a token."""
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


class TokenTree:
    """The committed tokens of one request for one member, and the nodes after them.

    >>> tree = TokenTree([7, 8])
    >>> tree.commit(tree.grow([5, 6]))
    >>> tree.ids, tree.root
    ([7, 8, 5, 6], Node(6, length=4))

    Attributes:
        ids: committed token ids, starting with the prompt, which has at least one.
        prompt_tokens: number of token ids of the prompt.
        adjustment: how the request changes the member's distributions; None for no changes.
        root: the node of the last committed token.
        state: the backend's state for this request, such as its cache. Only the backend uses it.
    """

    __slots__ = ("__weakref__", "adjustment", "ids", "prompt_tokens", "root", "state")

    def __init__(self, prompt: Sequence[int], adjustment: Adjustment | None = None) -> None:
        assert prompt, "a token tree needs at least one prompt token"
        self.ids: list[int] = list(prompt)
        self.prompt_tokens = len(self.ids)
        self.adjustment = adjustment
        self.root = Node(self.ids[-1], None, len(self.ids))
        self.state: object | None = None

    def child(self, node: Node, token: int) -> Node:
        """Return the child of `node` for `token`, and create it if necessary.

        Set the child's log-probability if the distribution after `node` lists the token.
        """
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = Node(token, node, node.length + 1)
        if child.logprob is None and node.next is not None and token in node.next.tokens:
            child.logprob = node.next.logprobs[node.next.tokens.index(token)]
        return child

    def grow(self, tokens: Sequence[int], start: Node | None = None) -> Node:
        """Follow `tokens` from `start` or the root. Add missing nodes, and return the last one."""
        node = start or self.root
        for token in tokens:
            node = self.child(node, token)
        return node

    def path(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes from the root to `node`, without the root."""
        line: tuple[Node, ...] = ()
        rest: list[Node] = []
        step = node
        while step.parent is not None:
            # use the path that a node keeps, unless a commit has shortened it
            if step.line and step.line[0].parent is self.root:
                line = step.line
                break
            rest.append(step)
            step = step.parent
        if rest:
            line = (*line, *reversed(rest))
            if len(line) <= MAX_LINE:
                node.line = line
        return line

    def tokens(self, node: Node) -> list[int]:
        """Return the token ids on the path from the root to `node`, without the root."""
        return [step.token for step in self.path(node)]

    def changes(self, node: Node) -> Changes | None:
        """Return the changes of the distribution after `node`; None for no changes."""
        if self.adjustment is None:
            return None
        return self.adjustment.changes(self.ids, self.prompt_tokens, self.tokens(node))

    def commit(self, node: Node) -> None:
        """Commit the path to `node`, make `node` the root, and drop all nodes not below it."""
        self.ids.extend(self.tokens(node))
        node.parent = None
        self.root = node

    def since(self, root: Node) -> Iterator[Node]:
        """Yield the committed nodes after `root`, a former root, up to the current root."""
        for token in self.ids[root.length :]:
            root = root.children[token]
            yield root

    def nodes(self, start: Node | None = None) -> Iterator[Node]:
        """Iterate over the nodes from `start` (default: the root), parents before children."""
        pending = [start or self.root]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
