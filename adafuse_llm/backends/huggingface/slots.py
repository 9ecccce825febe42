"""Key/value rows of many requests, side by side in buffers that stay in place.

Shapes: n new tokens of a request; k key/value heads of size d.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch

from adafuse_llm.backends.huggingface.kv import RowCache, RowLayer, to_device

FIRST_ROWS, HEADROOM = 512, 256
"""Minimum number of rows in a slot, and the rows that a request is expected to need beyond its
prompt."""

MAX_OVERSIZE = 4
"""Maximum size of the pool, relative to the most rows that its requests ever needed at once."""

PATIENCE = 8
"""Number of requests that must leave the pool before an empty pool trades slots for longer ones."""


class SlotRows:
    """Key/value rows of one request in a pool's buffers: what `RowCache` is on its own.

    Args:
        pool: where the rows are.
        room: rows that the request is expected to need.

    Attributes:
        index: its slot; None once it has left the pool for buffers of its own.
        rows: rows in use.
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
        """Bytes of one row in all layers."""
        return self._pool.row_bytes

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self._pool.capacity if self._own is None else self._own.capacity

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows [1, k, n, d] behind those in use; returns these and the new ones. The pass
        counts them when it is through.
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
        """Of the rows from `first` on, keep only `rows`, in that order, in every layer."""
        end = first + len(rows)
        if self._own is not None:
            self._own.keep(first, rows)
        else:
            for buffer in self._pool.buffers():
                rows = to_device(rows, buffer.device)  # once for all buffers of a device
                slot = buffer[self.index]  # [k, capacity, d]
                slot[:, first:end] = slot.index_select(1, rows)
        self.rows = end

    def copy(self, rows: torch.Tensor) -> RowCache:
        """A cache of its own that holds `rows` only, in that order."""
        if self._own is not None:
            return self._own.copy(rows)
        layers = []
        for pair in self._pool.layers:
            rows = to_device(rows, pair[0].device)  # once for all layers of a device
            keys, values = (buffer[self.index, None].index_select(2, rows) for buffer in pair)
            layers.append(RowLayer.of(keys, values))
        return RowCache.of(layers)

    def fill(self, cache: RowCache) -> None:
        """Begin with the rows of `cache`."""
        for index, layer in enumerate(cache.layers):
            rows = layer.get_seq_length()
            self.update(layer.keys[:, :, :rows], layer.values[:, :, :rows], index)
        self.rows = cache.rows

    def leave(self) -> None:
        """Move to buffers of its own."""
        self._own = self.copy(torch.arange(self.rows)) if self.rows else RowCache()
        self.index = None


class StaticPool:
    """The rows of a member's requests, side by side: per layer one buffer of keys and one of
    values, [slots, k, capacity, d].

    Used slots are always the first ones: when a request is gone, the last one moves into its slot.
    A request is gone when nobody holds its `SlotRows` any more. The last row of every slot is
    nobody's: padding is written there. Rows that were never written are zero, so that masked they
    stay without effect.

    What was recorded is lost when the buffers are replaced, so that happens seldom, in whatever
    order short and long requests come. Slots and capacity grow by doubling. A request leaves the
    pool if most of it were empty with as many slots as there are and as long as that request
    needs; capacity that no request in the pool needs is given up for more slots.

    Attributes:
        slots: requests that there is room for.
        capacity: rows of a slot, nobody's included.
        layers: the buffers, made when a layer is first run.
        moves: how often the buffers have been replaced.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.capacity = 0
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.moves = 0
        self._used: list[weakref.ref[SlotRows]] = []
        self._needed = 0  # most rows so far
        self._left = 0  # requests since the last move

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all layers."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in self.buffers())

    def buffers(self) -> Iterator[torch.Tensor]:
        """All buffers, of keys and of values."""
        return (buffer for pair in self.layers for buffer in pair)

    def layer(
        self, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of a layer, for rows like these, [*, k, *, d]."""
        if index == len(self.layers):
            self.layers.append((self._buffer(keys), self._buffer(values)))
        return self.layers[index]

    def take(self, length: int, rows: RowCache | None = None) -> SlotRows:
        """Rows for a request with a prompt of `length` tokens, the first of them given."""
        slot = SlotRows(self, max(length + HEADROOM, FIRST_ROWS - 1))
        self._fit(slot)
        if rows is not None:
            slot.fill(rows)
        return slot

    def reserve(self, needed: Mapping[SlotRows, int]) -> None:
        """Make room for so many rows of each request; those it does not fit leave the pool."""
        for slot, rows in needed.items():
            slot.room = max(slot.room, rows)
        self._fit()

    def _live(self) -> list[SlotRows]:
        """The requests in the pool by slot, after slots of those that are gone are given away."""
        while True:
            live = [ref() for ref in self._used]
            here = [slot for slot in live if slot is not None]
            if len(here) == len(live):
                return here
            self._vacate(max(index for index, slot in enumerate(live) if slot is None))

    def _vacate(self, index: int) -> None:
        """Move the last used slot to `index`."""
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
        """Grow to what the requests are expected to need; give the one that joins a slot."""
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
        """Slots and capacity for these requests; None if most rows would be empty."""
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
    """The smallest one that is not below `number`."""
    return 1 << (number - 1).bit_length() if number > 1 else 1
