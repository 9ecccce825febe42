"""Draw tokens from logits (`adafuse_llm.sampling`), for many nodes at a time.

Shapes: n nodes, v vocabulary. All floating-point numbers are float64, so that rounding decides
nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from adafuse_llm.backends.huggingface.kv import to_device
from adafuse_llm.sampling import (
    BITS,
    GAMMA,
    LAST_SHIFT,
    MIXING,
    NOISE_SHIFT,
    NOISE_UNIT,
    Draw,
)


def drawn(logits: torch.Tensor, draws: Sequence[Draw | None], codes: torch.Tensor) -> torch.Tensor:
    """Return the token that each node draws, [n, 1], or -1 for a node without a draw.

    Args:
        logits: the logits, [n, v]. Tokens that cannot follow are minus infinity.
        draws: how each node draws.
        codes: hashes of the tokens, [v], in the form of `signed`.
    """
    codes = codes.to(logits.device)
    tokens = torch.full((len(draws), 1), -1, device=logits.device)
    groups: dict[tuple[float, float, int | None], dict[int, int]] = defaultdict(dict)
    for row, draw in enumerate(draws):
        if draw is not None:
            groups[draw.temperature, draw.top_p, draw.top_k][row] = draw.key
    for (temperature, top_p, top_k), keys in groups.items():
        rows = to_device(torch.tensor(list(keys)), logits.device)
        chosen = logits.index_select(0, rows).double()
        scaled = (chosen - chosen.amax(-1, keepdim=True)) / temperature
        scaled = _without_unlikely(scaled, top_p, top_k)
        hashes = to_device(signed(list(keys.values()))[:, None], logits.device)
        tokens[rows] = (scaled + _noise(hashes, codes)).argmax(-1, keepdim=True)
    return tokens


def signed(hashes: Sequence[int]) -> torch.Tensor:
    """Return hashes from 0 to 2^64 - 1 as integers with a sign, which torch supports."""
    return torch.tensor([_signed(value) for value in hashes])


def _signed(value: int) -> int:
    return value - (value >> BITS - 1 << BITS)


def _without_unlikely(scaled: torch.Tensor, top_p: float, top_k: int | None) -> torch.Tensor:
    """Set tokens that `top_k` and `top_p` exclude to minus infinity.

    Args:
        scaled: log-probabilities up to a constant, [n, v], already divided by the temperature.
        top_p: as in `Draw`.
        top_k: as in `Draw`.
    """
    if top_k is not None and top_k < scaled.shape[-1]:
        least = scaled.topk(top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    if top_p < 1:
        values, order = scaled.sort(dim=-1, descending=True, stable=True)
        shares = values.softmax(-1)
        excluded = shares.cumsum(-1) - shares >= top_p
        excluded[:, 0] = False
        scaled = scaled.masked_fill(excluded.scatter(-1, order, excluded), -math.inf)
    return scaled


def _noise(keys: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the Gumbel noise of all tokens, [n, v], as `adafuse_llm.sampling.noise` does.

    Args:
        keys: hashes of the texts before the tokens, [n, 1], in the form of `signed`.
        codes: hashes of the tokens, [v], in the form of `signed`.
    """
    bits = (keys ^ codes) + _signed(GAMMA)  # integers wrap around
    for shift, factor in MIXING:
        bits = (bits ^ _shifted(bits, shift)) * _signed(factor)
    bits = bits ^ _shifted(bits, LAST_SHIFT)
    uniform = (_shifted(bits, NOISE_SHIFT).double() + 0.5) * NOISE_UNIT
    return -(-uniform.log()).log()


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift bits to the right, and fill with zeros whatever the sign."""
    return (bits >> shift) & ((1 << BITS - shift) - 1)
