"""Key/value rows of many requests, in shared buffers with one slot per request.

Shapes: n new tokens of a request; k key/value heads of size d.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch

from adafuse_llm.backends.huggingface.kv import RowCache, RowLayer
from adafuse_llm.backends.logits.rows import to_device


class LayerBuffers(NamedTuple):
    """The buffers of one layer, both [slots, k, capacity, d]."""

    keys: torch.Tensor
    values: torch.Tensor


class SlotRows:
    """The key/value rows of one request, in a slot. Implements `KeyValues`.

    Args:
        slots: buffers with a free slot.

    Attributes:
        slots: buffers that hold the rows.
        index: the request's slot in these buffers.
        rows: number of rows in use.
    """

    pooled = True
    slots: SlotBuffers
    index: int

    def __init__(self, slots: SlotBuffers) -> None:
        self.rows = 0
        slots.add(self)

    @property
    def row_bytes(self) -> int:
        """Size of one row in all layers together, in bytes."""
        return self.slots.row_bytes

    @property
    def capacity(self) -> int:
        """Number of rows that fit into the buffers."""
        return self.slots.capacity

    @property
    def layers(self) -> list[LayerBuffers]:
        """The buffers of each layer."""
        return self.slots.layers

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows, [1, k, n, d], from row `start` on, and return all rows up to their end.

        This method does not change the attribute `rows`, which increases at the end of the pass.
        """
        end = start + key_states.shape[2]
        keys, values = (
            buffer[self.index, None, :, :end]
            for buffer in self.slots.layer(layer_idx, key_states, value_states)
        )
        keys[:, :, start:] = key_states
        values[:, :, start:] = value_states
        return keys, values

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """In every layer, keep the rows before `first` and then the given rows, in this order."""
        end = first + len(rows)
        for buffer in self.slots.buffers():
            rows = to_device(rows, buffer.device)  # one copy serves all buffers of a device
            slot = buffer[self.index]  # [k, capacity, d]
            slot[:, first:end] = slot.index_select(1, rows)
        self.rows = end

    def copy(self, rows: torch.Tensor) -> RowCache:
        """Return a new cache that holds copies of the given rows, in this order."""
        layers = []
        for pair in self.slots.layers:
            rows = to_device(rows, pair.keys.device)  # one copy serves all layers of a device
            keys, values = (buffer[self.index, None].index_select(2, rows) for buffer in pair)
            layers.append(RowLayer.of(keys, values))
        return RowCache.of(layers)

    def fill(self, cache: RowCache) -> None:
        """Copy all rows of `cache` into the empty slot."""
        for index, layer in enumerate(cache.layers):
            rows = layer.get_seq_length()
            self.write(layer.keys[:, :, :rows], layer.values[:, :, :rows], index, 0)
        self.rows = cache.rows


class SlotBuffers:
    """The rows of several requests, in buffers with slots of the same size.

    The used slots always come before the free slots: when a request ends, the request in the last
    used slot moves into the free slot. A request has ended when no reference to its `SlotRows`
    remains. Rows that no pass has written are zero, so they have no effect if they are masked.

    Args:
        capacity: number of rows in a slot.

    Attributes:
        slots: number of requests that fit into the buffers.
        capacity: the argument of the same name.
        layers: the buffers of each layer, which the first pass creates.
    """

    def __init__(self, capacity: int) -> None:
        self.slots = 0
        self.capacity = capacity
        self.layers: list[LayerBuffers] = []
        self._used: list[weakref.ref[SlotRows]] = []

    @property
    def row_bytes(self) -> int:
        """Size of one row in all layers together, in bytes."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in self.buffers())

    @property
    def key_bytes(self) -> int:
        """Size of the keys of one row in one layer, in bytes; 0 before the first pass."""
        return self.row_bytes // max(1, 2 * len(self.layers))

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the key and value buffers of all layers."""
        return (buffer for pair in self.layers for buffer in pair)

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerBuffers:
        """Return the buffers of a layer, and create them if they do not exist.

        `keys` and `values`, [*, k, *, d], determine the shape of new buffers.
        """
        if index == len(self.layers):
            self.layers.append(LayerBuffers(self._buffer(keys), self._buffer(values)))
        return self.layers[index]

    def live(self) -> list[SlotRows]:
        """Free the slots of ended requests, and return the other requests in slot order."""
        while True:
            used = [ref() for ref in self._used]
            live = [slot for slot in used if slot is not None]
            if len(live) == len(used):
                return live
            self.vacate(max(index for index, slot in enumerate(used) if slot is None))

    def add(self, slot: SlotRows) -> None:
        """Assign the first free slot to a request."""
        slot.slots, slot.index = self, len(self._used)
        self._used.append(weakref.ref(slot))

    def vacate(self, index: int) -> None:
        """Free the slot `index` by moving the request in the last used slot into it."""
        last = len(self._used) - 1
        for buffer in self.buffers():
            if index < last:
                buffer[index] = buffer[last]
            buffer[last] = 0
        moved = self._used.pop()
        if index < last:
            self._used[index] = moved
            if (slot := moved()) is not None:
                slot.index = index

    def resize(self, slots: int) -> None:
        """Replace the buffers by buffers with another number of slots. The requests must fit."""
        self.slots = slots
        filled = [(slot.index, slot.rows) for slot in self.live() if slot.rows]
        for number, pair in enumerate(self.layers):
            grown = LayerBuffers(*map(self._buffer, pair))
            for new, old in zip(grown, pair, strict=True):
                for index, rows in filled:
                    new[index, :, :rows] = old[index, :, :rows]
            self.layers[number] = grown

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        _, heads, _, width = like.shape
        return like.new_zeros((self.slots, heads, self.capacity, width))
