"""How the rows of a request are kept: its keys and values, and which of them each token sees.

Shapes: n new tokens of the request, r rows of the request; k key/value heads of size d.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from adafuse_llm.backends.logits.state import to_device
from adafuse_llm.tree.tokens import Node, TokenTree

FIRST_ROWS = 64


class Rows:
    """The keys and values of some tokens, in buffers that grow by doubling.

    Attributes:
        count: number of rows.
        layers: keys and values by layer index, [1, k, capacity, d] each. What is at index `count`
            and above is undefined.
    """

    def __init__(self) -> None:
        self.count = 0
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers.values() for tensor in layer]

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of n tokens, [1, k, n, d], behind the rows of a layer.

        They become rows when `count` is increased, which is after the last layer.

        Returns:
            The keys and values of all rows and of these tokens, [1, k, r, d] each.
        """
        start, new = self.count, keys.shape[2]
        end = start + new
        if layer not in self.layers:
            self.layers[layer] = keys[:, :, :0], values[:, :, :0]
        old = self.layers[layer]
        if end > old[0].shape[2]:
            old = self.layers[layer] = self._grown(old[0], end), self._grown(old[1], end)
        old[0].narrow(2, start, new).copy_(keys)
        old[1].narrow(2, start, new).copy_(values)
        return old[0].narrow(2, 0, end), old[1].narrow(2, 0, end)

    def _grown(self, old: torch.Tensor, end: int) -> torch.Tensor:
        # Powers of two let the allocator reuse freed memory.
        capacity = max(FIRST_ROWS, 1 << (end - 1).bit_length())
        grown = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
        grown[:, :, : self.count] = old[:, :, : self.count]
        return grown

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """Keep the rows before `first` and then the given rows, in this order."""
        self.count = first + len(rows)
        for tensor in self.tensors():
            rows = to_device(rows, tensor.device)  # one copy serves all layers of a device
            tensor[:, :, first : self.count] = tensor.index_select(2, rows)

    def first(self, count: int) -> Rows:
        return self.copy(torch.arange(count))

    def copy(self, rows: torch.Tensor) -> Rows:
        """Return copies of some rows, in this order."""
        copied = Rows()
        copied.count = len(rows)
        for number, (keys, values) in self.layers.items():
            rows = to_device(rows, keys.device)
            copied.layers[number] = keys.index_select(2, rows), values.index_select(2, rows)
        return copied


def bytes_per_token(tensors: Iterable[torch.Tensor]) -> Counter[torch.device]:
    """Return the bytes that a token takes on each device, from keys and values, [1, k, r, d]."""
    sizes: Counter[torch.device] = Counter()
    for tensor in tensors:
        sizes[tensor.device] += tensor.shape[1] * tensor.shape[3] * tensor.element_size()
    return sizes


@dataclass(frozen=True)
class Piece:
    """The tokens of one request in a pass, which appends their n rows to those of the request.

    Attributes:
        positions: positions of all rows, [r], with the new rows at the end.
        visible: whether a token sees a row, [n, r]; None if it sees its own and all before it.
        keep: indices of the tokens whose logits the pass returns.
        nodes: nodes of the tokens in `keep`, in the same order.
    """

    rows: Rows
    tokens: Sequence[int]
    positions: NDArray[np.int64]
    visible: NDArray[np.bool_] | None
    keep: Sequence[int]
    nodes: Sequence[Node]

    @property
    def queries(self) -> NDArray[np.int64]:
        """Positions of the tokens, [n]."""
        return self.positions[len(self.positions) - len(self.tokens) :]

    def seen(self, window: int | None) -> NDArray[np.bool_]:
        """Return whether tokens see rows, [n, r], in a window of last tokens or, with None, all."""
        size, rows = len(self.tokens), len(self.positions)
        seen = self.visible
        if seen is None:
            seen = np.tri(size, rows, rows - size, dtype=np.bool_)
        if window is not None:
            seen = seen & (self.positions[None, :] > self.queries[:, None] - window)
        return seen


class TreeForm:
    """Tree attention: all nodes of a request's tree have rows in one buffer.

    Every new token sees the rows of the committed tokens (the trunk). The row of a node is visible
    to the nodes below it. Masks hide the rows of dropped nodes until these are more than a quarter
    of the buffer.

    Args:
        tree: the request's tree.
        rows: rows of the first tokens of the prompt, but not of its last token; None for no rows.

    Attributes:
        committed: number of tokens of ``tree.ids`` that have a row.
    """

    def __init__(self, tree: TokenTree, rows: Rows | None = None) -> None:
        self.rows = rows or Rows()
        self.committed = self.rows.count
        self._tree = tree
        self._root = tree.root
        self._trunk = np.ones(self.committed, dtype=np.bool_)  # [r] whether a row belongs to it
        self._positions = np.arange(self.committed, dtype=np.int64)  # [r]
        self._row: dict[Node, int] = {}  # rows of the nodes below the root

    def first(self, count: int) -> Rows:
        """Return copies of the rows of the first tokens, in order."""
        return self.rows.copy(torch.from_numpy(np.flatnonzero(self._trunk)[:count]))

    @property
    def unread(self) -> int:
        """Number of committed tokens without a row."""
        return len(self._tree.ids) - self.committed

    def tensors(self) -> list[torch.Tensor]:
        return self.rows.tensors()

    def read(self, count: int) -> Piece:
        """Return the piece that gives the next `count` committed tokens their rows."""
        return self._piece(self._tree.ids[self.committed : self.committed + count], [])

    def plan(self, nodes: Sequence[Node]) -> Piece:
        """Return the piece that evaluates nodes, parents before children.

        Every parent is among `nodes`, or is evaluated already.
        """
        below = [node for node in nodes if node is not self._tree.root]
        return self._piece(self._tree.ids[self.committed :], below)

    def reroot(self) -> None:
        """Drop the rows of nodes that the tree has dropped, and extend the trunk to the root."""
        # the new root has no row if it was only scored
        line = [self._row[n] for n in self._tree.since(self._root) if n in self._row]
        self._root = self._tree.root
        self._trunk[line] = True
        self.committed += len(line)
        nodes = (node for node in self._tree.nodes() if node is not self._root)
        self._row = {node: self._row[node] for node in nodes if node in self._row}
        self._compact()

    def _piece(self, pending: Sequence[int], below: Sequence[Node]) -> Piece:
        # new rows: the pending tokens, which extend the trunk, and then the nodes below the root
        rows = len(self._trunk)
        joined = rows + len(pending)  # each token sees the pending tokens before it
        size = joined + len(below)
        tokens = [*pending, *(node.token for node in below)]
        positions = np.array(
            [*range(self.committed, self.committed + len(pending))]
            + [node.length - 1 for node in below],
            dtype=np.int64,
        )
        self._row.update(zip(below, range(joined, size), strict=True))
        # one line of tokens, such as a prompt or a text to score, needs no mask
        line = zip(below, [self._tree.root, *below], strict=False)
        is_line = self._trunk.all() and all(node.parent is above for node, above in line)
        visible = None if is_line else self._visible(joined, below)
        self._positions = np.concatenate([self._positions, positions])
        self._trunk = np.concatenate([self._trunk, np.arange(rows, size) < joined])
        self.committed += len(pending)
        ends = [len(pending) - 1] if self.committed == len(self._tree.ids) and pending else []
        return Piece(
            self.rows,
            tokens,
            self._positions,
            visible,
            keep=[*ends, *range(len(pending), len(tokens))],
            nodes=[*([self._tree.root] if ends else []), *below],
        )

    def _visible(self, joined: int, below: Sequence[Node]) -> NDArray[np.bool_]:
        """Return whether each new token sees each row, [n, r]: pending tokens, and then `below`.

        The rows of the pending tokens end at `joined`.
        """
        rows, size = len(self._trunk), joined + len(below)
        visible = np.zeros((size - rows, size), dtype=np.bool_)
        visible[:, :rows] = self._trunk
        visible[:, rows:joined] = joined - rows < 2 or np.tri(size - rows, joined - rows)
        for row, node in enumerate(below, start=joined):
            # a node sees what its parent sees, and itself
            parent = node.parent
            above = -1 if parent is None else self._row.get(parent, -1)
            if above >= joined:
                visible[row - rows] = visible[above - rows]
            while parent is not None and 0 <= above < joined:
                visible[row - rows, above] = True
                parent = parent.parent
                above = -1 if parent is None else self._row.get(parent, -1)
            visible[row - rows, row] = True
        return visible

    def _compact(self) -> None:
        alive = self._trunk.copy()
        alive[list(self._row.values())] = True
        if 4 * int(np.count_nonzero(~alive)) <= len(alive):
            return
        first = int(np.argmin(alive))  # rows before the first dropped one stay in place
        rows = np.flatnonzero(alive)
        self.rows.keep(first, torch.from_numpy(rows[rows >= first]))
        moved = np.cumsum(alive) - 1
        self._trunk, self._positions = self._trunk[rows], self._positions[rows]
        self._row = {node: int(moved[row]) for node, row in self._row.items()}
