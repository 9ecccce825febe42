"""How the rows of a request are kept: its keys and values, and which of them each token sees.

Shapes: n new tokens of the request, r rows of the request; k key/value heads of size d.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from adafuse_llm.backends.logits.state import to_device
from adafuse_llm.tree.tokens import Node, TokenTree

FIRST_ROWS = 64
"""Number of rows of the shortest slots. Each longer slot has twice as many as the one before it."""

LONG_PIECE = 16
"""Number of tokens above which a piece attends alone."""

SLAB_ROWS = 2**14
"""Maximum number of rows of a slab with several slots."""


_numbers = itertools.count()


class Slab:
    """Buffers with slots of one length, so that a pass handles the rows of many requests at once.

    Attributes:
        number: slabs in their order, which orders a pass in the same way in every run.
        capacity: number of rows of a slot.
        slots: number of slots.
        free: the slots that no request has.
        layers: keys and values by layer index, [k, slots, capacity, d] each.
        flat: views of these, [k, slots * capacity, d] each.
    """

    def __init__(self, capacity: int, slots: int = 1) -> None:
        self.number = next(_numbers)
        self.capacity = capacity
        self.slots = slots
        self.free = list(range(slots))
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.flat: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(
        self, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers of a layer, which has keys and values like these, [1, k, n, d]."""
        if index not in self.layers:
            # zeros, because what attention masks must be a number
            keys, values = (
                like.new_zeros((like.shape[1], self.slots, self.capacity, like.shape[3]))
                for like in (keys, values)
            )
            self.put(index, keys, values)
        return self.layers[index]

    def put(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Set the buffers of a layer."""
        self.layers[index] = keys, values
        self.flat[index] = keys.flatten(1, 2), values.flatten(1, 2)

    def grow(self, slots: int) -> None:
        """Add slots, so that there are `slots`."""
        for index, buffers in self.layers.items():
            keys, values = (old.new_zeros((old.shape[0], slots, *old.shape[2:])) for old in buffers)
            for new, old in zip((keys, values), buffers, strict=True):
                # a growth that ran out of memory has left longer buffers in some layers
                new[:, : self.slots] = old[:, : self.slots]
            self.put(index, keys, values)
        self.free += range(self.slots, slots)
        self.slots = slots


class Rows:
    """The keys and values of some tokens, in one slot of a slab.

    Attributes:
        count: number of rows. What is behind them is undefined, but finite.
        slab: the slab; None before the first pass.
        slot: the slot.
    """

    def __init__(self, slab: Slab | None = None) -> None:
        self.count = 0
        self.slab: Slab | None = None
        self.slot = 0
        if slab is not None:
            self._take(slab)

    def __del__(self) -> None:
        if self.slab is not None:
            self.slab.free.append(self.slot)

    def _take(self, slab: Slab) -> None:
        self.slab, self.slot = slab, min(slab.free)  # the slots of a pass stand close together
        slab.free.remove(self.slot)

    def layers(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of all layers, [1, k, capacity, d] each, which are views."""
        layers = self.slab.layers.items() if self.slab else ()
        own = slice(self.slot, self.slot + 1)
        return {n: (k[:, own].transpose(0, 1), v[:, own].transpose(0, 1)) for n, (k, v) in layers}

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers().values() for tensor in layer]

    def move(self, slab: Slab) -> None:
        """Move the rows into a slot of another slab."""
        before, layers = (self.slab, self.slot), self.layers()
        self._take(slab)
        for index, (keys, values) in layers.items():
            slab.layer(index, keys, values)
            for new, old in zip(self.layers()[index], (keys, values), strict=True):
                new[:, :, : self.count] = old[:, :, : self.count]
        for tensor in self.tensors():  # an earlier request may have left NaN in the slot
            tensor[:, :, self.count :] = 0
        if before[0] is not None:
            before[0].free.append(before[1])

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """Keep the rows before `first` and then the given rows, in this order."""
        self.count = first + len(rows)
        for tensor in self.tensors():
            rows = to_device(rows, tensor.device)  # one copy serves all layers of a device
            tensor[:, :, first : self.count] = tensor.index_select(2, rows)

    def first(self, count: int) -> Rows:
        return self.copy(torch.arange(count))

    def copy(self, rows: torch.Tensor) -> Rows:
        """Return copies of some rows, in this order, in a slab of their own."""
        copied = Rows(Slab(max(1, len(rows))))
        copied.count = len(rows)
        assert copied.slab is not None
        for index, layer in self.layers().items():
            rows = to_device(rows, layer[0].device)
            keys, values = (each.index_select(2, rows).transpose(0, 1) for each in layer)
            copied.slab.put(index, keys, values)
        return copied


class Pool:
    """The slabs of a member. A slab without requests is freed."""

    def __init__(self) -> None:
        self._slabs: list[weakref.ref[Slab]] = []

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Make sure that the slots of requests have room for the rows of their pieces."""
        waiting: dict[int, list[Rows]] = defaultdict(list)
        for piece in pieces:
            rows, size = piece.rows, len(piece.positions)
            if rows.slab is None or rows.slab.capacity < size:
                waiting[max(FIRST_ROWS, 1 << (size - 1).bit_length())].append(rows)
        for capacity, group in waiting.items():
            for number, rows in enumerate(group):
                rows.move(self._slab(capacity, len(group) - number))

    def _slab(self, capacity: int, wanted: int) -> Slab:
        """Return a slab with a free slot. New slots are as many as wanted, or half of the old."""
        living = [slab for each in self._slabs if (slab := each()) is not None]
        most = max(1, SLAB_ROWS // capacity)
        same = [slab for slab in living if slab.capacity == capacity]
        for slab in same:
            if slab.free:
                return slab
        for slab in same:
            if slab.slots < most:
                slab.grow(min(most, slab.slots + max(wanted, slab.slots // 2)))
                return slab
        new = Slab(capacity, min(most, wanted))
        self._slabs = [*map(weakref.ref, living), weakref.ref(new)]
        return new


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
    def is_long(self) -> bool:
        """Whether the piece attends alone, because padding to its size would cost too much."""
        return len(self.tokens) > LONG_PIECE

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
        # one line of tokens, such as a prompt or a text to score, needs no mask
        line = zip(below, [self._tree.root, *below], strict=False)
        is_line = self._trunk.all() and all(node.parent is above for node, above in line)
        visible = None if is_line else self._visible(joined, below)
        self._row.update(zip(below, range(joined, size), strict=True))
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
        seen: dict[Node, NDArray[np.bool_]] = {}  # what the new nodes see, [r]
        for row, node in enumerate(below, start=joined):
            # a node sees what its parent sees, and itself
            above, own = node.parent, visible[row - rows]
            if above in seen:
                own |= seen[above]
            else:
                # an ancestor whose logits were dropped may run again, but has its earlier row
                while above in self._row:
                    own[self._row[above]] = True
                    above = above.parent
            own[row] = True
            seen[node] = own
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
