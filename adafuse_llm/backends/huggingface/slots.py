"""Key/value rows of many requests, in shared buffers that stay in place.

Shapes: n new tokens of a request; k key/value heads of size d.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch

from adafuse_llm.backends.huggingface.kv import RowCache, RowLayer
from adafuse_llm.backends.logits.rows import to_device

FIRST_ROWS, HEADROOM = 512, 256
"""Minimum number of rows in a slot, and the estimated number of rows that a request needs in
addition to its prompt."""

MAX_OVERSIZE = 4
"""Maximum number of rows in the pool, as a multiple of the largest number of rows that its requests
have needed at the same time."""

PATIENCE = 8
"""Number of requests that must leave the pool before the pool may replace its slots with fewer,
longer slots. The pool does so only while it holds a single request."""


class SlotRows:
    """The key/value rows of one request in the buffers of a pool. Implements `KeyValues`.

    Args:
        pool: pool that holds the rows.
        room: estimated number of rows that the request needs.

    Attributes:
        index: slot of the request; None if the rows are not in the pool. A request that has left
            the pool has its own buffers.
        rows: number of rows in use.
    """

    pooled = True

    def __init__(self, pool: StaticPool, room: int) -> None:
        self.index: int | None = None
        self.room = room
        self.rows = 0
        self._pool = pool
        self._own: RowCache | None = None

    @property
    def row_bytes(self) -> int:
        """Size of one row in all layers together, in bytes."""
        return self._pool.row_bytes

    @property
    def capacity(self) -> int:
        """Number of rows that fit into the buffers."""
        return self._pool.capacity if self._own is None else self._own.capacity

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows, [1, k, n, d], after the rows in use, and return all of these rows.

        This method does not change the attribute `rows`, which increases at the end of the pass.
        """
        if self._own is not None:
            own: tuple[torch.Tensor, torch.Tensor] = self._own.update(
                key_states, value_states, layer_idx
            )
            return own
        end = self.rows + key_states.shape[2]
        keys, values = (
            buffer[self.index, None, :, :end]
            for buffer in self._pool.layer(layer_idx, key_states, value_states)
        )
        keys[:, :, self.rows :] = key_states
        values[:, :, self.rows :] = value_states
        return keys, values

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """In every layer, keep the rows before `first` and then the given rows, in this order."""
        end = first + len(rows)
        if self._own is not None:
            self._own.keep(first, rows)
        else:
            for buffer in self._pool.buffers():
                rows = to_device(rows, buffer.device)  # one copy serves all buffers of a device
                slot = buffer[self.index]  # [k, capacity, d]
                slot[:, first:end] = slot.index_select(1, rows)
        self.rows = end

    def copy(self, rows: torch.Tensor) -> RowCache:
        """Return a new cache that holds copies of the given rows, in this order."""
        if self._own is not None:
            return self._own.copy(rows)
        layers = []
        for pair in self._pool.layers:
            rows = to_device(rows, pair[0].device)  # one copy serves all layers of a device
            keys, values = (buffer[self.index, None].index_select(2, rows) for buffer in pair)
            layers.append(RowLayer.of(keys, values))
        return RowCache.of(layers)

    def fill(self, cache: RowCache) -> None:
        """Copy all rows of `cache` into the empty slot."""
        for index, layer in enumerate(cache.layers):
            rows = layer.get_seq_length()
            self.update(layer.keys[:, :, :rows], layer.values[:, :, :rows], index)
        self.rows = cache.rows

    def leave(self) -> None:
        """Move the rows from the pool into the request's own buffers."""
        self._own = self.copy(torch.arange(self.rows)) if self.rows else RowCache()
        self.index = None


class StaticPool:
    """The rows of a member's requests, in shared buffers.

    Each layer has a buffer of keys and a buffer of values, both [slots, k, capacity, d].

    The used slots always come before the free slots: when a request ends, the request in the last
    used slot moves into the free slot. A request has ended when no reference to its `SlotRows`
    remains. The last row of each slot receives padding, so no request uses it. Rows that no pass
    has written are zero, so they have no effect if they are masked.

    When the pool replaces its buffers, all recorded passes become invalid. So the pool rarely does
    this, regardless of the order of short and long requests. The number of slots and the capacity
    grow by doubling. If the longest request needs slots so long that most rows would be empty, this
    request leaves the pool. When the pool adds slots, it may reduce the capacity if all requests
    still fit.

    Attributes:
        slots: number of requests that fit into the pool.
        capacity: number of rows in a slot, including the row for padding.
        layers: the buffers of each layer, which the first pass creates.
        moves: number of times that the pool has replaced the buffers.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.capacity = 0
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.moves = 0
        self._used: list[weakref.ref[SlotRows]] = []
        self._needed = 0  # most rows that the requests have needed at the same time
        self._left = 0  # requests that have left since the buffers were last replaced

    @property
    def row_bytes(self) -> int:
        """Size of one row in all layers together, in bytes."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in self.buffers())

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the key and value buffers of all layers."""
        return (buffer for pair in self.layers for buffer in pair)

    def layer(
        self, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers of a layer, and create them if they do not exist.

        `keys` and `values`, [*, k, *, d], determine the shape of new buffers.
        """
        if index == len(self.layers):
            self.layers.append((self._buffer(keys), self._buffer(values)))
        return self.layers[index]

    def take(self, length: int, rows: RowCache | None = None) -> SlotRows:
        """Assign a slot to a new request.

        Args:
            length: number of tokens in the prompt.
            rows: cached rows of the first tokens of the prompt; None if no rows are cached.
        """
        slot = SlotRows(self, max(length + HEADROOM, FIRST_ROWS - 1))
        self._fit(slot)
        if rows is not None:
            slot.fill(rows)
        return slot

    def reserve(self, needed: Mapping[SlotRows, int]) -> None:
        """Make room for the rows of each request. Requests that do not fit leave the pool."""
        for slot, rows in needed.items():
            slot.room = max(slot.room, rows)
        self._fit()

    def _live(self) -> list[SlotRows]:
        """Free the slots of ended requests, and return the other requests in slot order."""
        while True:
            used = [ref() for ref in self._used]
            live = [slot for slot in used if slot is not None]
            if len(live) == len(used):
                return live
            self._vacate(max(index for index, slot in enumerate(used) if slot is None))

    def _vacate(self, index: int) -> None:
        """Free the slot `index` by moving the request in the last used slot into it."""
        last = len(self._used) - 1
        for buffer in self.buffers():
            buffer[index] = buffer[last]
            buffer[last] = 0
        moved = self._used.pop()
        if index < last:
            self._used[index] = moved
            if (slot := moved()) is not None:
                slot.index = index

    def _fit(self, joining: SlotRows | None = None) -> None:
        """Resize the buffers to the estimated needs, and assign a slot to the joining request."""
        while True:
            requests = [*self._live(), *([joining] if joining else [])]
            if (size := self._size(requests)) is not None:
                break
            longest = max(requests, key=lambda slot: slot.room)
            index = longest.index
            longest.leave()
            self._left += 1
            if index is None:
                joining = None
            else:
                self._vacate(index)
        self._needed = max(self._needed, sum(slot.room + 1 for slot in requests))
        if size != (self.slots, self.capacity):
            self._resize(*size)
        if joining is not None:
            joining.index = len(self._used)
            self._used.append(weakref.ref(joining))

    def _size(self, requests: Sequence[SlotRows]) -> tuple[int, int] | None:
        """Return the number of slots and the capacity that `requests` need.

        Return None if most rows would be empty.
        """
        if not requests:
            return self.slots, self.capacity
        rooms = [slot.room + 1 for slot in requests]
        least, longest = power_of_two(len(rooms)), power_of_two(max(rooms))
        limit = MAX_OVERSIZE * max(self._needed, sum(rooms))
        patient = self._left < PATIENCE or len(rooms) > 1
        for slots in (max(self.slots, least), *([] if patient else [least])):
            capacity = max(self.capacity, longest)
            while slots * capacity > limit and capacity > longest:
                capacity //= 2
            if slots * capacity <= limit:
                return slots, capacity
        return None

    def _resize(self, slots: int, capacity: int) -> None:
        kept = min(self.capacity, capacity)
        self.slots, self.capacity = slots, capacity
        self.moves += 1
        self._left = 0
        for index, pair in enumerate(self.layers):
            grown = self._buffer(pair[0]), self._buffer(pair[1])
            for new, old in zip(grown, pair, strict=True):
                used = min(len(self._used), len(old))
                new[:used, :, :kept] = old[:used, :, :kept]
            self.layers[index] = grown

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        _, heads, _, width = like.shape
        return like.new_zeros((self.slots, heads, self.capacity, width))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length() if number > 1 else 1
