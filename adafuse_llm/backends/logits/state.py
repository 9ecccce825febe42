"""The logits that a backend keeps for the nodes of a running request.

Shapes: n nodes, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch

from adafuse_llm.backends.base import Query
from adafuse_llm.tree.tokens import Node, TokenTree


class Written:
    """Marks the tokens of the vocabulary that a request has committed, its prompt included."""

    def __init__(self) -> None:
        self._count = 0
        self._mask: torch.Tensor | None = None

    def mask(self, committed: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return whether each token of the vocabulary is in `committed`, [v]."""
        if self._mask is None:
            self._mask = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        if new := [token for token in committed[self._count :] if token < len(self._mask)]:
            self._mask[to_device(torch.tensor(new), logits.device)] = True
        self._count = len(committed)
        return self._mask


class RequestLogits:
    """The costs of a request, and the logits of its nodes, which later queries use, too."""

    def __init__(self, tree: TokenTree, reused: int = 0) -> None:
        self.tree = tree
        # the logits after each evaluated node, [v], and the log of their summed exponentials, [1]
        self.rows: dict[Node, tuple[torch.Tensor, torch.Tensor]] = {}
        # nodes that have run, but have lost their logits
        self.forgotten: set[Node] = set()
        self.written = Written()
        # costs since the last call of `costs`
        self.reused = reused
        self.passes = 0
        self.tokens = 0
        self._root = tree.root

    @property
    def unread(self) -> int:
        """Number of committed tokens that the member has not read, but can read in pieces."""
        raise NotImplementedError

    def drop(self) -> None:
        """Free what the request has in caches of the member."""
        return

    def follow(self) -> None:
        """Drop the data of nodes that the tree has dropped."""
        if self._root is not self.tree.root:
            before, self._root = self._root, self.tree.root
            nodes = set(self.tree.nodes())
            self.rows = {node: row for node, row in self.rows.items() if node in nodes}
            self.forgotten &= nodes
            self.reroot(before, nodes - {self._root})

    def reroot(self, before: Node, below: set[Node]) -> None:  # noqa: ARG002
        """Cache tokens committed after the old root `before`. Keep only the nodes in `below`."""
        return

    def missing(self, query: Query) -> list[Node]:
        """Return the nodes that must be evaluated for a query, parents before children."""
        needed = [*query.evaluate, *(node.parent for node in query.score if node.parent)]
        # forgotten nodes run again only if the query needs their own logits
        self.forgotten.difference_update(needed)
        return unknown(needed, {*self.rows, *self.forgotten} if self.forgotten else self.rows)

    def forget(self, nodes: Iterable[Node]) -> None:
        """Drop the logits of nodes that have run."""
        for node in nodes:
            del self.rows[node]
            self.forgotten.add(node)

    def costs(self) -> tuple[int, int, int]:
        """Return the numbers of passes, tokens and reused tokens since the last call."""
        costs = self.passes, self.tokens, self.reused
        self.passes = self.tokens = self.reused = 0
        return costs


def learn(logits: torch.Tensor, owners: Sequence[tuple[RequestLogits, Sequence[Node]]]) -> None:
    """Store the logits of a pass, [n, v], with rows in the order of `owners` and their nodes."""
    sizes = [len(nodes) for _, nodes in owners]
    totals = logits.logsumexp(-1, keepdim=True).split_with_sizes(sizes)
    parts = logits.split_with_sizes(sizes)
    if len(parts) > 1:  # copies, because a view would keep the whole pass in memory
        parts = torch._foreach_mul(parts, 1)
    for (state, nodes), part, total in zip(owners, parts, totals, strict=True):
        state.rows.update(zip(nodes, zip(part, total, strict=True), strict=True))


def unknown(nodes: Iterable[Node | None], known: Container[Node]) -> list[Node]:
    """Return `nodes` and their ancestors up to the first known one, parents before children."""
    missing: dict[Node, None] = {}
    for start in nodes:
        line, node = list[Node](), start
        while node is not None and node not in known and node not in missing:
            line.append(node)
            node = node.parent
        missing.update(dict.fromkeys(reversed(line)))
    return list(missing)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `values` to `device` without waiting for the pending work of a GPU."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def check_tokens(tokens: Sequence[int], size: int) -> None:
    """Raise a ValueError if an id is `size` or more, because this would corrupt a GPU's context."""
    if (highest := max(tokens, default=0)) >= size:
        raise ValueError(
            f"token {highest} is outside the model's {size} tokens: the tokenizer does not match "
            "the model"
        )
