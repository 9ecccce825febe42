"""Compute the attention of the tokens of one request in a packed pass.

Shapes: n tokens and r rows of the request; h query heads, k key/value heads of size d, g = h / k.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from adafuse_llm.backends.huggingface.pieces import Piece
from adafuse_llm.backends.logits.rows import to_device

FOLD_ROWS = 256
"""Maximum number of query rows after folding the query heads that share one key head. For few
tokens, one product with g times as many rows is faster than g products: with 14 heads on 2 and 300
rows, four tokens took 80 instead of 115 µs, and one token 34 instead of 58 µs."""

BLOCK_TOKENS = 256
"""Number of tokens of a long piece that are computed at a time."""


Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a request in one layer, both [1, k, r, d]."""


class PieceAttention:
    """The attention of one piece, in all layers.

    Args:
        piece: the piece.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._masks: dict[tuple[object, ...], torch.Tensor | None] = {}

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Return the results of the piece, [1, h, n, d].

        Args:
            query: queries of the piece, [1, h, n, d].
            keys: keys of the request, [1, k, r, d].
            values: values of the request, [1, k, r, d].
            window: number of tokens that the layer sees; None for all tokens.
            scale: factor of the attention scores; None for the default.
        """
        piece = self._piece
        _, heads, size, width = query.shape
        groups = heads // keys.shape[1]
        if size > BLOCK_TOKENS and piece.first and piece.visible is None and window is None:
            return self._in_blocks(query, keys, values, scale)
        causal = self._is_causal(window)
        folds = groups > 1 and size * groups <= FOLD_ROWS and not causal
        mask = None if causal else self._mask(window, groups if folds else 1, query)
        if folds:
            folded = query.reshape(1, heads // groups, groups * size, width)
            output = scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
            return output.view(1, heads, size, -1)
        if mask is not None:
            keys, values = _repeated(keys, groups), _repeated(values, groups)
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=keys.shape[1] != heads,
        )

    def _in_blocks(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return the results of a part of a prompt whose first part has rows already.

        Each block of queries reads only the rows before its end. A mask for all queries would be
        much larger, and PyTorch would compute what it hides.
        """
        heads, size, rows = query.shape[1], query.shape[2], keys.shape[2]
        keys, values = (_repeated(t, heads // t.shape[1]) for t in (keys, values))
        key = ("blocks", query.dtype, query.device)
        if key not in self._masks:
            last = np.tri(BLOCK_TOKENS, rows, rows - BLOCK_TOKENS, dtype=np.bool_)
            self._masks[key] = additive(last, query)
        mask = self._masks[key]  # for the last block; earlier blocks see fewer rows
        assert mask is not None
        outputs = []
        # The first block is the short one, so that the parts of the mask are aligned in memory.
        for later in reversed(range(0, size, BLOCK_TOKENS)):
            block = query[:, :, max(0, size - later - BLOCK_TOKENS) : size - later]
            outputs.append(
                scaled_dot_product_attention(
                    block,
                    keys[:, :, : rows - later],
                    values[:, :, : rows - later],
                    mask[BLOCK_TOKENS - block.shape[2] :, later:],
                    scale=scale,
                    enable_gqa=keys.shape[1] != heads,
                )
            )
        return torch.cat(outputs, dim=2)

    def _is_causal(self, window: int | None) -> bool:
        """Return whether PyTorch needs no mask, as in a prompt without earlier rows."""
        piece, size = self._piece, len(self._piece.tokens)
        is_prompt = 1 < size == len(piece.positions) and piece.visible is None
        return is_prompt and (window is None or size <= window)

    def _mask(self, window: int | None, groups: int, query: torch.Tensor) -> torch.Tensor | None:
        """Return the mask for `groups` folded heads, [groups * n, r]; None if it hides no row."""
        key = (window, groups, query.dtype, query.device)
        if key not in self._masks:
            seen = self._piece.sight(window)
            self._masks[key] = None if seen.all() else additive(seen, query).repeat(groups, 1)
        return self._masks[key]


def _repeated(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat keys or values for grouped heads, where PyTorch's kernels do not support a mask."""
    return rows if rows.device.type == "cpu" or groups == 1 else rows.repeat_interleave(groups, 1)


def additive(seen: NDArray[np.bool_], query: torch.Tensor) -> torch.Tensor:
    """Return a mask for adding to the scores of `query`, from the rows that are seen."""
    visible = to_device(torch.from_numpy(seen), query.device)
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
    return mask.masked_fill_(~visible, -math.inf)
