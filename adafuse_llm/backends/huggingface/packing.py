"""Run one forward pass over tokens of many requests. Each token attends only to its own request.

One sequence contains the tokens of all requests, so the model computes everything except attention
for all requests at once. The model gets a cache whose `update` writes the new rows into the slots
of their requests and returns `Rows` in place of keys. The model passes this object to
``scaled_dot_product_attention``. `Rows` intercepts the call and computes the attention of all
requests (`adafuse_llm.backends.huggingface.attention`). This module does not change the model or
any global state.

Shapes: T tokens of the pass; h query heads, k key/value heads of size d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from adafuse_llm.backends.huggingface.attention import plan_attention
from adafuse_llm.backends.huggingface.pieces import Piece
from adafuse_llm.backends.logits.rows import to_device

Attend = Callable[["torch.Tensor", "float | None"], "torch.Tensor"]
"""A function that computes a layer's attention from its queries, [1, h, T, d], and their scale."""


class Rows(torch.Tensor):
    """A placeholder for the keys of a layer.

    It holds the keys of the new tokens and an attention function. The placeholder calls this
    function in place of ``scaled_dot_product_attention``. Many models reshape the keys to repeat
    them for groups of query heads. Such operations return the placeholder unchanged.
    """

    attend: Attend

    @classmethod
    def of(cls, keys: torch.Tensor, attend: Attend) -> Rows:
        """Create `Rows` with the shape and values of `keys`."""
        rows = keys.as_subclass(cls)
        rows.attend = attend
        return rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            query, rows = args[:2]
            return rows.attend(query, kwargs.get("scale"))
        if func in _RESHAPING:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


_RESHAPING = frozenset(
    getattr(torch.Tensor, name)
    for name in ("__getitem__", "contiguous", "expand", "repeat_interleave", "reshape", "to")
)


class PackedCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of one pass over pieces of several requests.

    Args:
        pieces: the pieces, in the order of their tokens.
        windows: number of tokens that each sliding layer sees, by layer index.
        device: device of the rows.
    """

    def __init__(
        self, pieces: Sequence[Piece], windows: Mapping[int, int], device: torch.device
    ) -> None:
        super().__init__(layers=[])
        self._windows = windows
        self._writes, self._calls = plan_attention(pieces, device)
        starts = [call.pieces[0].start for call in self._calls if len(call.pieces) == 1]
        self._in_order = len(starts) == len(self._calls) and starts == sorted(starts)
        self._tokens = sum(len(piece.tokens) for piece in pieces)
        self._orders: dict[tuple[int, torch.device], torch.Tensor] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows, [1, k, T, d], into the slots of their requests."""
        for write in self._writes:
            write(key_states, value_states, layer_idx)
        rows = [call.rows(key_states, value_states, layer_idx) for call in self._calls]
        window = self._windows.get(layer_idx)

        def attend(query: torch.Tensor, scale: float | None) -> torch.Tensor:
            outputs = [
                call.attend(query, keys, values, window, scale)
                for call, (keys, values) in zip(self._calls, rows, strict=True)
            ]
            if self._in_order:
                return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
            heads = query.shape[1]
            joined = torch.cat([output.reshape(-1, output.shape[-1]) for output in outputs])
            ordered = joined.index_select(0, self._order(heads, joined.device))
            # The model swaps heads and tokens next, which is free in this order.
            return ordered.view(1, self._tokens, heads, -1).transpose(1, 2)

        return Rows.of(key_states, attend), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0. The model does not need the length, because it gets positions and masks."""
        return 0

    def _order(self, heads: int, device: torch.device) -> torch.Tensor:
        """Return the index of each token and head in the joined results of all calls, [T * h]."""
        key = (heads, device)
        if key not in self._orders:
            order = np.empty((self._tokens, heads), dtype=np.int64)
            start = 0
            for call in self._calls:
                slots, size = call.shape
                end = start + slots * heads * size
                indices = np.arange(start, end).reshape(slots, heads, size)
                for slot, placed in zip(call.slots, call.pieces, strict=True):
                    order[placed.indices] = indices[slot, :, : placed.size].T
                start = end
            self._orders[key] = to_device(torch.from_numpy(order.reshape(-1)), device)
        return self._orders[key]
