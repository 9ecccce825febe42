"""One forward pass over tokens of many requests, each attending to its own rows only.

The tokens of all requests stand side by side in one sequence, so that everything but attention is
computed for all of them at once. For attention the model is handed a cache whose `update` files
the new rows with their requests and returns `Rows` in place of keys; the model passes them on to
``scaled_dot_product_attention``, which is then computed request by request. Nothing is copied or
padded, and neither the model nor any global is changed.

Shapes: n new tokens of a request, r rows it has then; h query heads, k key/value heads of size d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from adafuse_llm.backends.huggingface.kv import KeyValues, to_device
from adafuse_llm.tree import Node

FOLD_ROWS = 256
"""Grouped query heads are folded into the rows of their key head up to so many rows."""


@dataclass(frozen=True)
class Piece:
    """What one request contributes to a pass.

    Attributes:
        cache: its rows; the pass appends n.
        tokens: n token ids.
        positions: [r] positions of all rows, the new ones last.
        visible: [n, r] which rows each token sees; None for all before it and itself.
        keep: indices of the tokens after which logits are wanted.
        nodes: what those tokens are, in the same order.
    """

    cache: KeyValues
    tokens: Sequence[int]
    positions: NDArray[np.int64]
    visible: NDArray[np.bool_] | None
    keep: Sequence[int]
    nodes: Sequence[Node]

    @property
    def queries(self) -> NDArray[np.int64]:
        """[n] positions of the tokens."""
        return self.positions[len(self.positions) - len(self.tokens) :]

    @cached_property
    def seen(self) -> NDArray[np.bool_]:
        """`visible`, written out."""
        if self.visible is not None:
            return self.visible
        size, rows = len(self.tokens), len(self.positions)
        return np.tri(size, rows, rows - size, dtype=np.bool_)

    def within(self, window: int) -> NDArray[np.bool_] | None:
        """`visible` for a layer that sees `window` tokens only."""
        if int(self.positions.max()) - int(self.positions.min()) < window:
            return self.visible
        return self.seen & (self.positions[None, :] > self.queries[:, None] - window)

    def sight(self, window: int | None) -> NDArray[np.bool_]:
        """`visible` for a layer that sees `window` tokens, or all for None, written out."""
        within = None if window is None else self.within(window)
        return self.seen if within is None else within


Attend = Callable[["torch.Tensor", "float | None"], "torch.Tensor"]
"""Attention of a layer, given its queries [1, h, n, d] and their scale."""


class Rows(torch.Tensor):
    """Stands for the keys of a layer until attention is computed: keys of the new tokens, and how
    to attend. Reshaping it (models repeat key heads for groups of query heads) does nothing.
    """

    attend: Attend

    @classmethod
    def of(cls, keys: torch.Tensor, attend: Attend) -> Rows:
        """Rows that look like `keys`."""
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
        pieces: in the order of their tokens.
        windows: tokens that a layer sees, by index, for layers that do not see all.
    """

    def __init__(self, pieces: Sequence[Piece], windows: Mapping[int, int]) -> None:
        super().__init__(layers=[])
        self._windows = windows
        self._pieces: list[tuple[Piece, int, int]] = []
        end = 0
        for piece in pieces:
            start, end = end, end + len(piece.tokens)
            self._pieces.append((piece, start, end))
        self._masks: dict[tuple[int, int | None, torch.device], torch.Tensor | None] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """File the new rows, [1, k, n, d], with their requests."""
        rows = [
            piece.cache.update(
                key_states[:, :, start:end], value_states[:, :, start:end], layer_idx
            )
            for piece, start, end in self._pieces
        ]
        window = self._windows.get(layer_idx)

        def attend(query: torch.Tensor, scale: float | None) -> torch.Tensor:
            if len(rows) == 1:
                return self._attend(0, window, query, rows[0], scale)
            parts = [
                self._attend(index, window, query[:, :, start:end], rows[index], scale)
                for index, (_, start, end) in enumerate(self._pieces)
            ]
            return torch.cat(parts, dim=2)

        return Rows.of(key_states, attend), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing counts rows here: positions and masks are given."""
        return 0

    def _attend(
        self,
        index: int,
        window: int | None,
        query: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor],
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of one piece: query and result [1, h, n, d], keys and values [1, k, r, d].

        A single token's query may come as [1, k, h / k, d], its heads folded by the model.
        """
        keys, values = rows
        mask, causal = self._mask(index, window, query.device), self._is_prompt(index)
        groups = query.shape[1] // keys.shape[1]
        if groups == 1:
            return scaled_dot_product_attention(
                query, keys, values, mask, is_causal=causal and mask is None, scale=scale
            )
        _, heads, size, width = query.shape
        if size * groups <= FOLD_ROWS:
            folded = query.reshape(1, heads // groups, groups * size, width)
            if mask is None and causal:
                mask = to_device(torch.from_numpy(self._pieces[index][0].seen), query.device)
            if mask is not None:
                mask = mask.repeat(groups, 1)
            output = scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
            return output.reshape(query.shape[:-1] + output.shape[-1:])
        if mask is not None and query.device.type != "cpu":  # no fused kernel takes both
            keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            mask,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=keys.shape[1] != heads,
        )

    def _is_prompt(self, index: int) -> bool:
        """Whether a piece has several tokens, and its tokens are all of its rows."""
        piece = self._pieces[index][0]
        return 1 < len(piece.tokens) == len(piece.positions)

    def _mask(self, index: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """[n, r]; None where a piece is a single token that sees everything, or a whole prompt."""
        known = (index, window, device)
        if known not in self._masks:
            piece = self._pieces[index][0]
            visible = piece.visible if window is None else piece.within(window)
            if visible is None and len(piece.tokens) > 1 and not self._is_prompt(index):
                visible = piece.seen
            mask = None if visible is None else to_device(torch.from_numpy(visible), device)
            self._masks[known] = mask
        return self._masks[known]
