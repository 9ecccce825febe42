"""The token tree: what one member has evaluated beyond the committed prefix of one request.

A node is one token. Algorithm 1 needs two facts about it, its log-probability under its parent
and the distribution after it; both are asked of a backend, many nodes at a time, and then kept
here. Committing a span re-roots the tree at the span's last token: what was evaluated below it
stays valid, its siblings are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Next:
    """Summary of a member's next-token distribution p.

    Attributes:
        tokens: the likeliest token ids, likeliest first, equal ones by lower id.
        logprobs: their natural-log probabilities.
        end_logprob: log of the summed probability of the member's end-of-sequence ids.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    end_logprob: float

    @property
    def greedy(self) -> int:
        """The likeliest token."""
        return self.tokens[0]

    @property
    def margin(self) -> float:
        """Δ = p(1) - p(2), equation 1; a vocabulary of one token has margin p(1)."""
        second = math.exp(self.logprobs[1]) if len(self.logprobs) > 1 else 0.0
        return math.exp(self.logprobs[0]) - second


class Node:
    """One token of a member's tree.

    Attributes:
        token: its id.
        parent: the node before it; None for the root.
        length: tokens of the sequence that ends with it, prompt included (position + 1).
        logprob: natural log of its probability under its parent, once known.
        next: the distribution after it, once evaluated.
        children: nodes by token id.
    """

    __slots__ = ("children", "length", "logprob", "next", "parent", "token")

    def __init__(self, token: int, parent: Node | None, length: int) -> None:
        self.token = token
        self.parent = parent
        self.length = length
        self.logprob: float | None = None
        self.next: Next | None = None
        self.children: dict[int, Node] = {}

    def __repr__(self) -> str:
        return f"Node({self.token}, length={self.length})"


class TokenTree:
    """The committed tokens of one request at one member, and the nodes beyond them.

    Args:
        prompt: the prompt's token ids, at least one.

    Attributes:
        ids: committed token ids, prompt first.
        root: the node of the last committed token.
        cuts: how often nodes were dropped, by a commit or otherwise.
        state: for the backend's use (its cache for this request); nobody else touches it.
    """

    __slots__ = ("cuts", "ids", "root", "state")

    def __init__(self, prompt: Sequence[int]) -> None:
        assert prompt, "a token tree needs at least one prompt token"
        self.ids: list[int] = list(prompt)
        self.root = Node(self.ids[-1], None, len(self.ids))
        self.cuts = 0
        self.state: object | None = None

    def child(self, node: Node, token: int) -> Node:
        """The child of `node` for `token`, made if absent; its log-probability is filled in
        where the distribution after `node` already tells it.
        """
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = Node(token, node, node.length + 1)
        if child.logprob is None and node.next is not None and token in node.next.tokens:
            child.logprob = node.next.logprobs[node.next.tokens.index(token)]
        return child

    def grow(self, tokens: Sequence[int], start: Node | None = None) -> Node:
        """The node that `tokens` lead to from `start` (default: the root); missing nodes are
        made.
        """
        node = start or self.root
        for token in tokens:
            node = self.child(node, token)
        return node

    def path(self, node: Node) -> list[Node]:
        """Nodes from below the root to `node`; empty for the root."""
        path: list[Node] = []
        current: Node | None = node
        while current is not None and current is not self.root:
            path.append(current)
            current = current.parent
        path.reverse()
        return path

    def tokens(self, node: Node) -> list[int]:
        """Token ids from below the root to `node`."""
        return [step.token for step in self.path(node)]

    def commit(self, node: Node) -> None:
        """Make `node` the root: its path is committed, everything beside the path is dropped."""
        self.ids.extend(self.tokens(node))
        node.parent = None
        self.root = node
        self.cuts += 1

    def prune(self, ends: Iterable[Node]) -> None:
        """Drop every node that is neither on the way to one of `ends` nor below one."""
        kept = set(ends)
        on_the_way = {node for end in kept for node in self.path(end)}
        pending = [self.root]
        while pending:
            node = pending.pop()
            if node not in kept:
                node.children = {
                    t: child for t, child in node.children.items() if child in on_the_way
                }
                pending.extend(node.children.values())
        self.cuts += 1

    def nodes(self) -> Iterator[Node]:
        """Every node, the root first, parents before children."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
