"""Key/value rows of one request: a transformers cache whose rows can be dropped and reordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST_ROWS = 64


class KeyValues(Protocol):
    """The key/value rows of one request: [1, kv_heads, rows, head_dim] in every layer."""

    @property
    def rows(self) -> int:
        """Rows in use."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all layers."""
        ...

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        ...

    @property
    def pooled(self) -> bool:
        """Whether the buffers hold rows of other requests, too."""
        ...

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows to a layer; returns all of its rows."""
        ...

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """Of the rows from `first` on, keep only `rows`, in that order, in every layer."""
        ...

    def copy(self, rows: torch.Tensor) -> RowCache:
        """A cache that holds `rows` only, in that order."""
        ...


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on `device`, without waiting for what a GPU is at."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer, in a buffer that grows by doubling.

    Attributes:
        keys, values: [1, kv_heads, capacity, head_dim]; rows past `used` are garbage.
        used: rows in use.
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
        """Append rows; returns all rows in use, [1, kv_heads, used, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        if end > self.keys.shape[2]:
            capacity = max(FIRST_ROWS, 1 << (end - 1).bit_length())  # few sizes: freed ones fit
            self.keys = _grown(self.keys, key_states, self.used, capacity)
            self.values = _grown(self.values, value_states, self.used, capacity)
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """Of the rows from `first` on, keep only `rows` (on the device), in that order."""
        end = first + len(rows)
        self.keys[:, :, first:end] = self.keys.index_select(2, rows)
        self.values[:, :, first:end] = self.values.index_select(2, rows)
        self.used = end

    def copy(self, rows: torch.Tensor) -> RowLayer:
        """A layer that holds `rows` only, in that order."""
        if not self.is_initialized:
            return RowLayer()
        rows = to_device(rows, self.keys.device)
        return RowLayer.of(self.keys.index_select(2, rows), self.values.index_select(2, rows))

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> RowLayer:
        """A layer that holds these rows."""
        made = cls()
        made.lazy_initialization(keys, values)
        made.keys, made.values, made.used = keys, values, keys.shape[2]
        return made

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """One `RowLayer` per layer of the model."""

    pooled = False

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RowLayer)

    @classmethod
    def of(cls, layers: Sequence[RowLayer]) -> RowCache:
        """A cache of these layers."""
        made = cls()
        made.layers = list(layers)
        return made

    @property
    def rows(self) -> int:
        """Rows in use."""
        return int(self.layers[0].get_seq_length()) if self.layers else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all layers."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors)

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return int(self.layers[0].keys.shape[2]) if self.layers else 0

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """Of the rows from `first` on, keep only `rows`, in that order, in every layer."""
        for layer in self.layers:
            rows = to_device(rows, layer.keys.device)  # once for all layers of a device
            layer.keep(first, rows)

    def copy(self, rows: torch.Tensor) -> RowCache:
        """A cache that holds `rows` only, in that order."""
        return RowCache.of([layer.copy(rows) for layer in self.layers])


def _grown(old: torch.Tensor, like: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    batch, heads, _, width = like.shape
    grown = like.new_empty((batch, heads, capacity, width))
    grown[:, :, :used] = old[:, :, :used]
    return grown


def device_shares(layers: Sequence[Any]) -> dict[torch.device, float]:
    """The part of a token's key/value bytes that lies on each device; empty without such rows."""
    found: Counter[torch.device] = Counter()
    for layer in layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 4:
                found[tensor.device] += tensor.shape[1] * tensor.shape[3] * tensor.element_size()
    return {device: size / found.total() for device, size in found.items()}
