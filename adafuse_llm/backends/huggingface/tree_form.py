"""Evaluate the nodes of a tree in one pass, over one buffer of key/value rows (tree attention).

Shapes: n new tokens, r rows in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from adafuse_llm.backends.huggingface.kv import RowCache
from adafuse_llm.backends.huggingface.pieces import Piece
from adafuse_llm.tree import Node, TokenTree

CAUSAL_TOKENS = 64
"""Maximum number of pending tokens that share a pass with nodes. If more tokens are pending, they
get a pass without nodes, which needs no mask."""


class TreeForm:
    """Tree attention over one growing buffer of key/value rows.

    Every new token sees the rows of the committed tokens (the trunk). The row of a node is visible
    to the nodes below it. Masks hide the rows of dropped nodes. Once these rows are more than a
    quarter of the buffer, they are removed.

    Args:
        tree: the request's tree.
        chunked: whether a long prompt may run in several passes.
        cache: cached rows of the first tokens of the prompt, but not of its last token.

    Attributes:
        cache: the key/value rows.
        committed: number of tokens of ``tree.ids`` that have a row.
    """

    def __init__(self, tree: TokenTree, *, chunked: bool, cache: RowCache | None = None) -> None:
        self.cache = RowCache() if cache is None else cache
        self.committed = self.cache.rows
        self._tree = tree
        self._root = tree.root
        self._chunked = chunked
        self._trunk = np.ones(self.committed, dtype=np.bool_)  # [r] whether a row belongs to it
        self._positions = np.arange(self.committed, dtype=np.int64)  # [r]
        self._lines: dict[Node, list[int]] = {}  # rows on the path to a node

    @property
    def row_bytes(self) -> int:
        """Size of one row in all layers together, in bytes."""
        return self.cache.row_bytes

    @property
    def layers(self) -> Sequence[Any]:
        """The layers of the cache, with their keys and values."""
        layers: Sequence[Any] = self.cache.layers
        return layers

    @property
    def trunk(self) -> torch.Tensor:
        """Row indices of the first `committed` tokens, in order."""
        return torch.from_numpy(np.flatnonzero(self._trunk))

    @property
    def unread(self) -> int:
        """Number of committed tokens without a row, if they may run in several passes."""
        return len(self._tree.ids) - self.committed if self._chunked else 0

    def read(self, count: int) -> Piece:
        """Return the piece that gives the next `count` committed tokens their rows."""
        return self._piece(self._tree.ids[self.committed : self.committed + count], [])

    def plan(self, nodes: Sequence[Node]) -> list[Piece]:
        """Return the pieces that evaluate `nodes`, in the order in which they must run.

        Args:
            nodes: nodes to evaluate, parents before children. The parent of each node is also in
                `nodes`, or is evaluated already.
        """
        pending = self._tree.ids[self.committed :]  # committed, but not in the buffer yet
        below = [node for node in nodes if node is not self._tree.root]
        if self._chunked and below and len(pending) > CAUSAL_TOKENS:
            return [self._piece(pending, []), self._piece([], below)]
        return [self._piece(pending, below)]

    def reroot(self) -> None:
        """Drop the rows of nodes that the tree has dropped, and extend the trunk to the root."""
        line: list[int] = []
        for node in self._tree.since(self._root):
            line = self._lines.get(node, line)  # the new root has no row if it was only scored
        self._root = self._tree.root
        self._trunk[line] = True
        self.committed += len(line)
        self._lines = {
            node: self._lines[node][len(line) :]
            for node in self._tree.nodes()
            if node in self._lines and node is not self._root
        }
        self._compact()

    def _piece(self, pending: Sequence[int], below: Sequence[Node]) -> Piece:
        """Create a piece of pending tokens, which extend the trunk, and nodes below the root."""
        rows = len(self._trunk)
        joined = rows + len(pending)  # each token sees the pending tokens before it
        size = joined + len(below)
        tokens = [*pending, *(node.token for node in below)]
        for row, node in enumerate(below, start=joined):
            assert node.parent is not None
            self._lines[node] = [*self._lines.get(node.parent, ()), row]
        positions = np.array(
            [*range(self.committed, self.committed + len(pending))]
            + [node.length - 1 for node in below],
            dtype=np.int64,
        )
        visible = None
        if below or not self._trunk.all():
            visible = np.zeros((size - rows, size), dtype=np.bool_)
            visible[:, :rows] = self._trunk
            visible[:, rows:joined] = len(pending) < 2 or np.tri(size - rows, len(pending))
            for row, node in enumerate(below, start=joined):
                visible[row - rows, self._lines[node]] = True
            if np.count_nonzero(visible) == len(tokens) * (rows + size + 1) // 2:
                visible = None  # causal attention is enough for a single line without gaps
        self._positions = np.concatenate([self._positions, positions])
        self._trunk = np.concatenate([self._trunk, np.arange(rows, size) < joined])
        self.committed += len(pending)
        ends = [len(pending) - 1] if self.committed == len(self._tree.ids) and pending else []
        return Piece(
            self.cache,
            tokens,
            self._positions,
            visible,
            keep=[*ends, *range(len(pending), len(tokens))],
            nodes=[*([self._tree.root] if ends else []), *below],
        )

    def _compact(self) -> None:
        """Remove the rows of dropped nodes if they are more than a quarter of the buffer."""
        alive = self._trunk.copy()
        for line in self._lines.values():
            alive[line] = True
        if 4 * int(np.count_nonzero(~alive)) <= len(alive):
            return
        first = int(np.argmin(alive))  # rows before the first dropped one stay in place
        rows = np.flatnonzero(alive)
        self.cache.keep(first, torch.from_numpy(rows[rows >= first]))
        moved = np.cumsum(alive) - 1
        self._trunk, self._positions = self._trunk[rows], self._positions[rows]
        self._lines = {node: moved[line].tolist() for node, line in self._lines.items()}
