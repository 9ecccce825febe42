"""Keep the rows (keys and values) of requests, and find out which rows a token sees.

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

from adafuse_llm.backends.logits.state import RequestLogits, to_device
from adafuse_llm.tree.tokens import Node, TokenTree

FIRST_ROWS = 64
"""Number of rows of the shortest slots in a `Pool`. Others have two, four, ... times as many."""

LONG_PIECE = 16
"""Maximum number of tokens in a piece that attends together with others."""

SLAB_ROWS = 2**14
"""Maximum number of rows of a slab with several slots."""


KeysValues = tuple[torch.Tensor, torch.Tensor]

_numbers = itertools.count()


class Slab:
    """Buffers of keys and values, divided into slots of `capacity` rows. A request has one slot."""

    def __init__(self, capacity: int, slots: int = 1) -> None:
        # orders the slabs in a pass, in the same way in every run
        self.number = next(_numbers)
        self.capacity = capacity
        self.slots = slots
        self.free = list(range(slots))
        # keys and values by layer index, [k, slots, capacity, d]
        self.layers: dict[int, KeysValues] = {}

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """Return the buffers of a layer. `keys` and `values` are new ones for it, [1, k, n, d]."""
        if index not in self.layers:
            # zeros, because even masked values must not be NaN
            keys, values = (
                like.new_zeros((like.shape[1], self.slots, self.capacity, like.shape[3]))
                for like in (keys, values)
            )
            self.layers[index] = keys, values
        return self.layers[index]

    def grow(self, slots: int) -> None:
        for index, buffers in self.layers.items():
            keys, values = (old.new_zeros((old.shape[0], slots, *old.shape[2:])) for old in buffers)
            for new, old in zip((keys, values), buffers, strict=True):
                # if an earlier `grow` ran out of memory, some buffers have more slots
                new[:, : self.slots] = old[:, : self.slots]
            self.layers[index] = keys, values
        self.free += range(self.slots, slots)
        self.slots = slots


class Rows:
    """The keys and values of some tokens, in one slot of a slab."""

    def __init__(self, slab: Slab | None = None) -> None:
        # the rows after the first `count` are undefined, but finite
        self.count = 0
        # None before the first pass
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

    def layers(self) -> dict[int, KeysValues]:
        """Return views of the keys and values, [1, k, capacity, d], by layer index."""
        layers = self.slab.layers.items() if self.slab else ()
        own = slice(self.slot, self.slot + 1)
        return {n: (k[:, own].transpose(0, 1), v[:, own].transpose(0, 1)) for n, (k, v) in layers}

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers().values() for tensor in layer]

    def move(self, slab: Slab) -> None:
        """Move the rows into a slot of another slab."""
        before, layers = (self.slab, self.slot), self.layers()
        self._take(slab)
        # copy the rows
        for index, (keys, values) in layers.items():
            slab.layer(index, keys, values)
            for new, old in zip(self.layers()[index], (keys, values), strict=True):
                new[:, :, : self.count] = old[:, :, : self.count]
        # an earlier request may have left NaN in the slot
        for tensor in self.tensors():
            tensor[:, :, self.count :] = 0
        # let other requests take the old slot
        if before[0] is not None:
            before[0].free.append(before[1])

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """Keep the rows before `first`, and `rows`, in this order, after them. Drop all others."""
        self.count = first + len(rows)
        for tensor in self.tensors():
            rows = to_device(rows, tensor.device)  # one copy serves all layers of a device
            tensor[:, :, first : self.count] = tensor.index_select(2, rows)

    def first(self, count: int) -> Rows:
        return self.copy(torch.arange(count))

    def copy(self, rows: torch.Tensor) -> Rows:
        """Return copies of `rows`, in this order, in a new slab."""
        copied = Rows(Slab(max(1, len(rows))))
        copied.count = len(rows)
        assert copied.slab is not None
        for index, layer in self.layers().items():
            rows = to_device(rows, layer[0].device)
            keys, values = (each.index_select(2, rows).transpose(0, 1) for each in layer)
            copied.slab.layers[index] = keys, values
        return copied


class Pool:
    """The slabs of a member. A slab that no request uses is freed."""

    def __init__(self) -> None:
        self._slabs: weakref.WeakSet[Slab] = weakref.WeakSet()

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Give the request of every piece a slot with room for its old and new rows."""
        waiting: dict[int, list[Rows]] = defaultdict(list)
        for piece in pieces:
            rows, size = piece.request.kv, len(piece.positions)
            if rows.slab is None or rows.slab.capacity < size:
                waiting[max(FIRST_ROWS, 1 << (size - 1).bit_length())].append(rows)
        for capacity, group in waiting.items():
            for number, rows in enumerate(group):
                rows.move(self._slab(capacity, len(group) - number))

    def _slab(self, capacity: int, wanted: int) -> Slab:
        """Return a slab with a free slot. `wanted`: how many slots are still needed."""
        same = [slab for slab in self._slabs if slab.capacity == capacity]
        same.sort(key=lambda slab: slab.number)
        for slab in same:
            if slab.free:
                return slab
        # no slot is free: add as many as wanted, or half as many as there are if that is more
        most = max(1, SLAB_ROWS // capacity)
        for slab in same:
            if slab.slots < most:
                slab.grow(min(most, slab.slots + max(wanted, slab.slots // 2)))
                return slab
        new = Slab(capacity, min(most, wanted))
        self._slabs.add(new)
        return new


def bytes_per_token(tensors: Iterable[torch.Tensor]) -> Counter[torch.device]:
    """Return the bytes that one token takes in keys and values, [1, k, r, d], by device."""
    sizes: Counter[torch.device] = Counter()
    for tensor in tensors:
        sizes[tensor.device] += tensor.shape[1] * tensor.shape[3] * tensor.element_size()
    return sizes


@dataclass(frozen=True)
class Piece:
    """The tokens of one request in a pass. The pass appends their n rows to the request's rows."""

    request: TreeForm
    tokens: Sequence[int]
    # positions of all rows, [r]; the new rows are the last
    positions: NDArray[np.int64]
    # whether each token sees each row, [n, r]; None if each sees its own row and all before
    visible: NDArray[np.bool_] | None
    # indices and nodes of the tokens whose logits the pass returns
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
        """Return whether tokens see rows, [n, r], among the last `window` positions (None: all)."""
        size, rows = len(self.tokens), len(self.positions)
        seen = self.visible
        if seen is None:
            seen = np.tri(size, rows, rows - size, dtype=np.bool_)
        if window is not None:
            seen = seen & (self.positions[None, :] > self.queries[:, None] - window)
        return seen


class TreeForm(RequestLogits):
    """A request whose tokens all have rows in one slot: the committed ones and those of nodes.

    A token sees the rows of the committed tokens (the trunk) before it. A node also sees the rows
    of the nodes above it. Masks hide rows of dropped nodes, until `_compact` removes them once they
    are over a quarter of all rows. `kv`: rows of the first tokens of the prompt, but not of all.
    """

    def __init__(self, tree: TokenTree, kv: Rows | None = None) -> None:
        self.kv = kv or Rows()
        super().__init__(tree, self.kv.count)
        # number of tokens of `tree.ids` that have a row
        self.committed = self.kv.count
        # whether each row belongs to the trunk, and its position, [r]
        self._trunk = np.ones(self.committed, dtype=np.bool_)
        self._positions = np.arange(self.committed, dtype=np.int64)
        # by node below the root: the index of its row
        self._row: dict[Node, int] = {}

    def first(self, count: int) -> Rows:
        """Return copies of the rows of the first `count` tokens, in order."""
        return self.kv.copy(torch.from_numpy(np.flatnonzero(self._trunk)[:count]))

    @property
    def unread(self) -> int:
        return len(self.tree.ids) - self.committed

    def tensors(self) -> list[torch.Tensor]:
        return self.kv.tensors()

    def read(self, count: int) -> Piece:
        """Return the piece that computes the rows of the next `count` committed tokens."""
        return self._piece(self.tree.ids[self.committed : self.committed + count], [])

    def plan(self, nodes: Sequence[Node]) -> Piece:
        """Return the piece that evaluates nodes, which are ordered parents before children.

        Every parent is among `nodes`, or is already evaluated.
        """
        below = [node for node in nodes if node is not self.tree.root]
        return self._piece(self.tree.ids[self.committed :], below)

    def reroot(self, before: Node, below: set[Node]) -> None:
        # the last committed tokens have no rows if no pass has run them, such as forced text
        line = [self._row[n] for n in self.tree.since(before) if n in self._row]
        self._trunk[line] = True
        self.committed += len(line)
        self._row = {node: row for node, row in self._row.items() if node in below}
        self._compact()

    def _piece(self, pending: Sequence[int], below: Sequence[Node]) -> Piece:
        # lay out the new rows: pending tokens, which extend the trunk, and nodes below the root
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
        line = zip(below, [self.tree.root, *below], strict=False)
        is_line = self._trunk.all() and all(node.parent is above for node, above in line)
        visible = None if is_line else self._visible(joined, below)
        # add the rows to those of the request
        self._row.update(zip(below, range(joined, size), strict=True))
        self._positions = np.concatenate([self._positions, positions])
        self._trunk = np.concatenate([self._trunk, np.arange(rows, size) < joined])
        self.committed += len(pending)
        # the last pending token may be the root, whose logits are kept like those of the nodes
        ends = [len(pending) - 1] if self.committed == len(self.tree.ids) and pending else []
        return Piece(
            self,
            tokens,
            self._positions,
            visible,
            keep=[*ends, *range(len(pending), len(tokens))],
            nodes=[*([self.tree.root] if ends else []), *below],
        )

    def _visible(self, joined: int, below: Sequence[Node]) -> NDArray[np.bool_]:
        """Return whether each new token sees each row, [n, r]."""
        rows, size = len(self._trunk), joined + len(below)
        visible = np.zeros((size - rows, size), dtype=np.bool_)
        # all tokens see the trunk and the pending tokens before them
        visible[:, :rows] = self._trunk
        visible[:, rows:joined] = joined - rows < 2 or np.tri(size - rows, joined - rows)
        seen: dict[Node, NDArray[np.bool_]] = {}  # what the new nodes see, [r]
        for row, node in enumerate(below, start=joined):
            # a node sees what its parent sees, and itself
            above, own = node.parent, visible[row - rows]
            if above in seen:
                own |= seen[above]
            else:
                # take the ancestors' rows from earlier passes, even if some ancestors run again now
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
        # rows before the first dropped one stay in place
        first = int(np.argmin(alive))
        rows = np.flatnonzero(alive)
        self.kv.keep(first, torch.from_numpy(rows[rows >= first]))
        # update the row numbers: the kept rows are now contiguous
        moved = np.cumsum(alive) - 1
        self._trunk, self._positions = self._trunk[rows], self._positions[rows]
        self._row = {node: int(moved[row]) for node, row in self._row.items()}
