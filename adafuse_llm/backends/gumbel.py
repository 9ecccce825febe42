"""The Gumbel-max rule that `adafuse_llm.sampling` describes, for the tokens after one node.

`adafuse_llm.backends.logits.draw` applies it to tensors, for many nodes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adafuse_llm.sampling import Draw

BITS = 64
GAMMA = 0x9E3779B97F4A7C15
"""Constants of splitmix64 (Steele et al., OOPSLA 2014): the increment, and the steps of `mix`."""
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
NOISE_SHIFT = 12
"""Number of lowest bits of a hash that the noise ignores. 52 bits remain."""
NOISE_UNIT = 2.0**-52


def noise(key: int, codes: Sequence[int] | NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the Gumbel noise of tokens, from the hashes of the text before them and of the tokens.

    Backends with tensors compute the same numbers on their own device.
    """
    bits = np.asarray(codes, np.uint64) ^ np.uint64(key)
    bits = mix(bits + np.uint64(GAMMA))
    uniform = ((bits >> np.uint64(NOISE_SHIFT)).astype(np.float64) + 0.5) * NOISE_UNIT
    return -np.log(-np.log(uniform))


def mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits in which every bit depends on every bit of `bits` (splitmix64)."""
    for shift, factor in MIXING:
        bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(factor)
    return bits ^ bits >> np.uint64(LAST_SHIFT)


def drawn(logits: Sequence[float], codes: Sequence[int], draw: Draw) -> int:
    """Return the index of the drawn token.

    The order is that of transformers: the temperature, then `top_k`, `top_p` and `min_p`.

    Args:
        logits: log-probabilities of the tokens that can follow, up to a constant.
        codes: the tokens' hashes, in the same order.
        draw: how to draw.
    """
    scaled = np.asarray(logits, np.float64)
    scaled = (scaled - scaled.max()) / draw.temperature
    order = np.argsort(-scaled, kind="stable")
    if draw.top_k is not None and draw.top_k < len(order):
        order = order[scaled[order] >= scaled[order[draw.top_k - 1]]]
    chances = np.exp(scaled[order])
    before = np.concatenate([[0.0], chances.cumsum()[:-1]])
    kept = (before < draw.top_p * chances.sum()) & (chances >= draw.min_p)
    kept[0] = True
    order = np.sort(order[kept])
    return int(
        order[np.argmax(scaled[order] + noise(draw.key, np.asarray(codes, np.uint64)[order]))]
    )
