"""Key/value rows of one request: a transformers cache whose rows can be dropped and reordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from adafuse_llm.backends.logits.rows import to_device

FIRST_ROWS = 64


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """The keys and values of one layer, in buffers that grow by doubling.

    Attributes:
        keys, values: buffers, [1, kv_heads, capacity, head_dim]. The rows at index `used` and above
            are undefined.
        used: number of rows in use.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.used = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows, and return all rows in use, [1, kv_heads, used, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        end = self.used + new
        if end > self.keys.shape[2]:
            # Powers of two let the allocator reuse freed memory.
            capacity = max(FIRST_ROWS, 1 << (end - 1).bit_length())
            self.keys = _grown(self.keys, key_states, self.used, capacity)
            self.values = _grown(self.values, value_states, self.used, capacity)
        self.keys.narrow(2, self.used, new).copy_(key_states)
        self.values.narrow(2, self.used, new).copy_(value_states)
        self.used = end
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """Keep the rows before `first` and then the given rows, in this order.

        `rows` must be on the device of the layer.
        """
        end = first + len(rows)
        self.keys[:, :, first:end] = self.keys.index_select(2, rows)
        self.values[:, :, first:end] = self.values.index_select(2, rows)
        self.used = end

    def copy(self, rows: torch.Tensor) -> RowLayer:
        """Return a new layer that holds copies of the given rows, in this order."""
        if not self.is_initialized:
            return RowLayer()
        rows = to_device(rows, self.keys.device)
        return RowLayer.of(self.keys.index_select(2, rows), self.values.index_select(2, rows))

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> RowLayer:
        """Create a layer that holds `keys` and `values`."""
        layer = cls()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.used = keys, values, keys.shape[2]
        return layer

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """A cache with one `RowLayer` per layer of the model."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RowLayer)

    @classmethod
    def of(cls, layers: Sequence[RowLayer]) -> RowCache:
        """Create a cache that consists of `layers`."""
        cache = cls()
        cache.layers = list(layers)
        return cache

    @property
    def rows(self) -> int:
        """Number of rows in use."""
        return int(self.layers[0].get_seq_length()) if self.layers else 0

    @property
    def row_bytes(self) -> int:
        """Size of one row in all layers together, in bytes."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors)

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """In every layer, keep the rows before `first` and then the given rows, in this order."""
        for layer in self.layers:
            rows = to_device(rows, layer.keys.device)  # one copy serves all layers of a device
            layer.keep(first, rows)

    def copy(self, rows: torch.Tensor) -> RowCache:
        """Return a new cache that holds copies of the given rows, in this order."""
        return RowCache.of([layer.copy(rows) for layer in self.layers])


def _grown(old: torch.Tensor, like: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    batch, heads, _, width = like.shape
    grown = like.new_empty((batch, heads, capacity, width))
    grown[:, :, :used] = old[:, :, :used]
    return grown


def device_shares(layers: Sequence[Any]) -> dict[torch.device, float]:
    """Return each device's share of a token's key/value bytes; empty if no layer has any."""
    sizes: Counter[torch.device] = Counter()
    for layer in layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 4:
                sizes[tensor.device] += tensor.shape[1] * tensor.shape[3] * tensor.element_size()
    return {device: size / sizes.total() for device, size in sizes.items()}
