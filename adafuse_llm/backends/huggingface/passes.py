"""Run the passes that `TreeForm` plans.

`PackedPasses` runs the plans of many requests at once, `SinglePasses` runs them one by one with a
mask for the model.

Shapes: v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from adafuse_llm.backends.huggingface.architecture import Attention
from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.backends.huggingface.packing import PackedCache, Piece

PREFILL_TOKENS = 2048
"""Most tokens in one forward pass, which bounds the memory of its activations."""


class PackedPasses:
    """Runs pieces of many requests in one pass.

    Args:
        decoder: the model.
        attention: its layers.
    """

    def __init__(self, decoder: Decoder, attention: Attention) -> None:
        self._decoder = decoder
        self._windows = attention.windows
        blank = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=attention.device)
        masks = dict.fromkeys(attention.layer_types, blank)  # spares the model to make one
        self._mask = masks if len(masks) > 1 else blank

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Logits after the kept tokens of each piece in turn, [sum of their numbers, v]."""
        tokens = [token for piece in pieces for token in piece.tokens]
        positions = np.concatenate([piece.queries for piece in pieces]).tolist()
        starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)]).tolist()
        keep = [start + i for start, piece in zip(starts, pieces, strict=False) for i in piece.keep]
        cache = PackedCache(pieces, self._windows)
        return self._decoder.run(tokens, cache, keep=keep, positions=positions, mask=self._mask)[0]


class SinglePasses:
    """Runs one piece in a pass, with a mask for the model.

    Args:
        decoder: the model.
        attention: its layers.
    """

    def __init__(self, decoder: Decoder, attention: Attention) -> None:
        self._decoder = decoder
        self._attention = attention

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Logits after the kept tokens of the piece, [their number, v]."""
        (piece,) = pieces
        mask = None if piece.visible is None else self._attention.mask(piece)
        return self._decoder.run(
            piece.tokens, piece.cache, keep=piece.keep, positions=piece.queries.tolist(), mask=mask
        )[0]
