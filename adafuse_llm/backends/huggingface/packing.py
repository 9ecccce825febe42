"""Run one forward pass over tokens of many requests. Each token attends only to its own request.

One sequence contains the tokens of all requests, so the model computes everything except attention
for all requests at once. The model gets a cache whose `update` appends the new rows to the caches
of their requests and returns `Rows` in place of keys. The model passes this object to
``scaled_dot_product_attention``. `Rows` intercepts the call and computes the attention of each
request in turn. This module does not pad requests or copy their rows into one buffer, and it does
not change the model or any global state.

Shapes: n new tokens of a request, r rows of the request after the pass; h query heads, k key/value
heads of size d.
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

from adafuse_llm.backends.huggingface.kv import KeyValues
from adafuse_llm.backends.logits.rows import to_device
from adafuse_llm.tree import Node

FOLD_ROWS = 256
"""Maximum number of query rows after folding the query heads that share one key head."""


@dataclass(frozen=True)
class Piece:
    """The tokens of one request in a pass.

    Attributes:
        cache: the request's rows. The pass appends n rows.
        tokens: n token ids.
        positions: positions of all rows, [r], with the new rows at the end.
        visible: whether each token sees each row, [n, r]; None if each token sees its own row and
            all rows before it.
        keep: indices of the tokens whose logits the pass returns.
        nodes: nodes of the tokens in `keep`, in the same order.
    """

    cache: KeyValues
    tokens: Sequence[int]
    positions: NDArray[np.int64]
    visible: NDArray[np.bool_] | None
    keep: Sequence[int]
    nodes: Sequence[Node]

    @property
    def queries(self) -> NDArray[np.int64]:
        """Positions of the tokens, [n]."""
        return self.positions[len(self.positions) - len(self.tokens) :]

    @cached_property
    def seen(self) -> NDArray[np.bool_]:
        """`visible`, [n, r], with a causal mask in place of None."""
        if self.visible is not None:
            return self.visible
        size, rows = len(self.tokens), len(self.positions)
        return np.tri(size, rows, rows - size, dtype=np.bool_)

    def within(self, window: int) -> NDArray[np.bool_] | None:
        """Return `visible` for a layer that sees only the last `window` tokens."""
        if int(self.positions.max()) - int(self.positions.min()) < window:
            return self.visible
        return self.seen & (self.positions[None, :] > self.queries[:, None] - window)

    def sight(self, window: int | None) -> NDArray[np.bool_]:
        """Return `seen` for a layer that sees the last `window` tokens; None means all tokens."""
        within = None if window is None else self.within(window)
        return self.seen if within is None else within


Attend = Callable[["torch.Tensor", "float | None"], "torch.Tensor"]
"""A function that computes a layer's attention from its queries, [1, h, n, d], and their scale."""


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
        """Append the new rows, [1, k, n, d], to the caches of their requests."""
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
        """Return 0. The model does not need the length, because it gets positions and masks."""
        return 0

    def _attend(
        self,
        index: int,
        window: int | None,
        query: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor],
        scale: float | None,
    ) -> torch.Tensor:
        """Compute the attention of one piece.

        The query and the result are [1, h, n, d], keys and values [1, k, r, d]. For a single token,
        a model may fold the heads into a query of shape [1, k, h / k, d].
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
        # No fused GPU kernel supports both a mask and grouped heads.
        if mask is not None and query.device.type != "cpu":
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
        """Return whether a piece has several tokens and no earlier rows."""
        piece = self._pieces[index][0]
        return 1 < len(piece.tokens) == len(piece.positions)

    def _mask(self, index: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return the mask of a piece, [n, r]; None for a prompt or one token that sees all rows."""
        key = (index, window, device)
        if key not in self._masks:
            piece = self._pieces[index][0]
            visible = piece.visible if window is None else piece.within(window)
            if visible is None and len(piece.tokens) > 1 and not self._is_prompt(index):
                visible = piece.seen
            mask = None if visible is None else to_device(torch.from_numpy(visible), device)
            self._masks[key] = mask
        return self._masks[key]
