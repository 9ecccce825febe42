"""Draw tokens from logits (`adafuse_llm.sampling`), for many nodes at a time.

Shapes: n nodes, v vocabulary. All floating-point numbers are float64, so that rounding decides
nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from adafuse_llm.backends.gumbel import (
    BITS,
    GAMMA,
    LAST_SHIFT,
    MIXING,
    NOISE_SHIFT,
    NOISE_UNIT,
)
from adafuse_llm.backends.logits.likeliest import likeliest
from adafuse_llm.backends.logits.rows import to_device
from adafuse_llm.sampling import Draw

FIRST_LIKELY = 512
"""Number of likeliest tokens among which `top_p` is looked for first."""

GROWTH = 8
"""Factor by which this number grows while it is too low."""


def drawn(logits: torch.Tensor, draws: Sequence[Draw | None], codes: torch.Tensor) -> torch.Tensor:
    """Return the token that each node draws, [n, 1], or -1 for a node without a draw.

    Args:
        logits: the logits, [n, v]. Tokens that cannot follow are minus infinity.
        draws: how each node draws.
        codes: hashes of the tokens, [v], in the form of `signed`.
    """
    codes = codes.to(logits.device)
    tokens = torch.full((len(draws), 1), -1, device=logits.device)
    groups: dict[tuple[float, float, int | None, float], dict[int, int]] = defaultdict(dict)
    for row, draw in enumerate(draws):
        if draw is not None:
            groups[draw.temperature, draw.top_p, draw.top_k, draw.min_p][row] = draw.key
    for (temperature, top_p, top_k, min_p), keys in groups.items():
        rows = to_device(torch.tensor(list(keys)), logits.device)
        chosen = logits.index_select(0, rows).double()
        scaled = chosen.sub_(chosen.amax(-1, keepdim=True)).div_(temperature)
        hashes = to_device(signed(list(keys.values()))[:, None], logits.device)
        lowest = math.log(min_p) if min_p else -math.inf
        if top_k is None and top_p == 1:
            scaled.masked_fill_(scaled < lowest, -math.inf)
            tokens[rows] = _noise(hashes ^ codes).add_(scaled).argmax(-1, keepdim=True)
        else:
            likely, ids = _likely(scaled, top_p, top_k)
            likely.masked_fill_(likely < lowest, -math.inf)
            place = _noise(hashes ^ codes[ids]).add_(likely).argmax(-1, keepdim=True)
            tokens[rows] = ids.gather(-1, place)
    return tokens


def signed(hashes: Sequence[int]) -> torch.Tensor:
    """Return hashes from 0 to 2^64 - 1 as integers with a sign, which torch supports."""
    return torch.tensor([_signed(value) for value in hashes])


def _signed(value: int) -> int:
    return value - (value >> BITS - 1 << BITS)


def _likely(
    scaled: torch.Tensor, top_p: float, top_k: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that `top_k` and `top_p` leave.

    Args:
        scaled: log-probabilities up to a constant, [n, v], already divided by the temperature.
        top_p: as in `Draw`.
        top_k: as in `Draw`.

    Returns:
        The values of the likeliest tokens, where excluded ones are minus infinity, and their ids,
        [n, t] each.
    """
    size = scaled.shape[-1]
    count = min(size, FIRST_LIKELY if top_k is None else top_k)
    while True:
        values, ids, tied = likeliest(scaled, count)
        if top_k is None:
            total = scaled.logsumexp(-1, keepdim=True)
        else:  # tokens that are as likely as the last one stay, too
            least = values[:, min(top_k, size) - 1 :][:, :1]
            values = values.masked_fill(values < least, -math.inf)
            total = values.logsumexp(-1, keepdim=True)
        shares = (values - total).exp()
        sums = shares.cumsum(-1)
        is_short = tied | (sums[:, -1:] < top_p) if top_k is None else tied
        if count == size or not bool(is_short.any()):
            excluded = sums - shares >= top_p
            excluded[:, 0] = False
            return values.masked_fill(excluded, -math.inf), ids
        count = min(size, count * GROWTH)


def _noise(bits: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise, as `adafuse_llm.backends.gumbel.noise` does.

    Args:
        bits: hashes of the texts before the tokens, XOR hashes of the tokens, in the form of
            `signed`. The function overwrites them.
    """
    bits += _signed(GAMMA)  # integers wrap around
    for shift, factor in MIXING:
        bits ^= _shifted(bits, shift)
        bits *= _signed(factor)
    bits ^= _shifted(bits, LAST_SHIFT)
    uniform = _shifted(bits, NOISE_SHIFT).double().add_(0.5).mul_(NOISE_UNIT)
    return uniform.log_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift bits to the right, and fill with zeros whatever the sign."""
    return (bits >> shift).bitwise_and_((1 << BITS - shift) - 1)
