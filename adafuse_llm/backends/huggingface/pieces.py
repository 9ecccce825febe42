"""The tokens of one request in a forward pass.

Shapes: n new tokens of a request, r rows of the request after the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from adafuse_llm.backends.huggingface.kv import RowCache
from adafuse_llm.tree import Node


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

    cache: RowCache
    tokens: Sequence[int]
    positions: NDArray[np.int64]
    visible: NDArray[np.bool_] | None
    keep: Sequence[int]
    nodes: Sequence[Node]

    @property
    def queries(self) -> NDArray[np.int64]:
        """Positions of the tokens, [n]."""
        return self.positions[len(self.positions) - len(self.tokens) :]

    @property
    def first(self) -> int:
        """Index of the first new row."""
        return len(self.positions) - len(self.tokens)

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
