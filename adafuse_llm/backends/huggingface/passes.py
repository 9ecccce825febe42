"""Run the passes that `TreeForm` plans.

`PackedPasses` runs the pieces of many requests in one pass. `SinglePasses` runs one piece per pass,
with a mask for the model.

Shapes: v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from adafuse_llm.backends.huggingface.architecture import Attention
from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.backends.huggingface.packing import PackedCache, configs_of, packed
from adafuse_llm.backends.huggingface.pieces import Piece

PREFILL_TOKENS = 2048
"""Maximum number of tokens in one forward pass. This limits the memory for activations."""

PIECE_TOKENS = (128, 512)
"""Number of tokens in a piece of a prompt on a CPU, while other requests write and while none does.
Other requests wait for the pass over a piece. But passes over few tokens take longer in all: a
model with 0.5 B parameters read 114 tokens per CPU second in passes over 512 tokens, 103 in
passes over 128, and 81 in passes over 64."""


class PackedPasses:
    """A runner of packed passes over pieces of many requests.

    Args:
        decoder: the model.
        attention: format of the tree masks that the model accepts.
    """

    def __init__(self, decoder: Decoder, attention: Attention) -> None:
        self._decoder = decoder
        self._configs = configs_of(decoder.model)
        self._windows = attention.windows
        blank = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=attention.device)
        # If the model gets no mask, it creates one.
        masks = dict.fromkeys(attention.layer_types, blank)
        self._mask = masks if len(masks) > 1 else blank

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the logits after the kept tokens of all pieces, in order, [kept tokens, v]."""
        tokens = [token for piece in pieces for token in piece.tokens]
        positions = np.concatenate([piece.queries for piece in pieces]).tolist()
        starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)]).tolist()
        keep = [start + i for start, piece in zip(starts, pieces, strict=False) for i in piece.keep]
        cache = PackedCache(pieces, self._windows)
        with packed(self._configs, cache):
            logits, _ = self._decoder.run(
                tokens, cache, keep=keep, positions=positions, mask=self._mask
            )
        cache.check_read()
        return logits


class SinglePasses:
    """Run passes over a single piece each. The model gets the mask of the piece.

    Args:
        decoder: the model.
        attention: format of the tree masks that the model accepts.
    """

    def __init__(self, decoder: Decoder, attention: Attention) -> None:
        self._decoder = decoder
        self._attention = attention

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the logits after the kept tokens of the piece, [kept tokens, v]."""
        (piece,) = pieces
        mask = None if piece.visible is None else self._attention.mask(piece)
        return self._decoder.run(
            piece.tokens, piece.cache, keep=piece.keep, positions=piece.queries.tolist(), mask=mask
        )[0]
