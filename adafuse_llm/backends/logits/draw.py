"""Draw tokens from logits by the rule of `adafuse_llm.tree.sampling`, for many nodes at a time.

Shapes: n nodes, v vocabulary, t likeliest tokens. Draws use float64, so rounding decides none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from adafuse_llm.backends.logits.state import to_device
from adafuse_llm.tree.sampling import Draw

SMALL = 4096
"""Maximum size of a vocabulary for which exact draws cost next to nothing."""

TRIED = 3
"""Number of tokens that a fast draw compares with `top_p`."""

UNSURE = 1e-5
"""Difference of probabilities that float32 cannot tell apart."""

NONE, REDO = -1, -2
"""Numbers in place of a token: the node has no draw, or its draw must be repeated exactly."""


def drawn(
    logits: torch.Tensor,
    draws: Sequence[Draw | None],
    codes: torch.Tensor,
    word_ends: Sequence[int] | torch.Tensor = (),
    *,
    exact: bool = True,
) -> torch.Tensor:
    """Return the token that each node draws, [n, 1], or `NONE` for a node without a draw.

    The order is that of transformers: the temperature, then `top_k`, `top_p` and `min_p`.

    Args:
        logits: the logits, [n, v]. Tokens that cannot follow are minus infinity.
        draws: how each node draws.
        codes: hashes of the tokens, [v], in the form of `signed`.
        word_ends: ids of the tokens that begin with whitespace or end the response.
        exact: whether to finish every draw. Otherwise, the few that would have to wait for the
            device are `REDO`.
    """
    codes = codes.to(logits.device)
    tokens = torch.full((len(draws), 1), NONE, device=logits.device)
    # group the nodes by their rule
    groups: dict[Draw, dict[int, int]] = defaultdict(dict)
    for row, draw in enumerate(draws):
        if draw is not None:
            groups[replace(draw, key=0)][row] = draw.key
    for rule, keys in groups.items():
        rows = to_device(torch.tensor(list(keys)), logits.device)
        hashes = to_device(signed(list(keys.values())), logits.device)[:, None]
        # after a word, only a token that ends it can follow
        is_end = None
        if rule.after_word:
            is_end = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            is_end[torch.as_tensor(word_ends, dtype=torch.long)] = True
        is_fast = not exact and rule.top_k is None and logits.shape[-1] > SMALL
        draw_rows = _draw_fast if is_fast else _draw
        scaled = logits.index_select(0, rows).double()
        scaled = scaled.sub_(scaled.amax(-1, keepdim=True)).div_(rule.temperature)
        tokens[rows] = draw_rows(scaled, rule, hashes, codes, is_end)
    return tokens


def _draw(
    scaled: torch.Tensor,
    rule: Draw,
    hashes: torch.Tensor,
    codes: torch.Tensor,
    is_end: torch.Tensor | None,
) -> torch.Tensor:
    """Return the token that each row draws, [n, 1].

    `scaled` are log-probabilities after the temperature, [n, v], shifted so that each row's highest
    is 0.
    """
    # the tokens that the options leave
    values, ids = _possible(scaled, rule)
    if is_end is not None:
        ends = values.masked_fill(~is_end[ids], -math.inf)
        values = torch.where(ends.amax(-1, keepdim=True) > -math.inf, ends, values)
    # the highest sum of log-probability and noise wins
    place = noise(hashes ^ codes[ids]).add_(values).argmax(-1, keepdim=True)
    return ids.gather(-1, place)


def _draw_fast(
    scaled: torch.Tensor,
    rule: Draw,
    hashes: torch.Tensor,
    codes: torch.Tensor,
    is_end: torch.Tensor | None,
) -> torch.Tensor:
    """Return what `_draw` returns without `top_k`, or `REDO`, but do not sort the vocabulary.

    Of the tokens with the highest sums, the first one that `top_p` leaves wins: excluding others
    does not change the order of the sums.
    """
    # the tokens with the highest sums of log-probability and noise
    sums = noise(hashes ^ codes).add_(scaled)
    if is_end is not None:
        sums = sums.masked_fill(~is_end, -math.inf)
    if rule.min_p:
        sums = sums.masked_fill(scaled < math.log(rule.min_p), -math.inf)
    sums, ids = sums.topk(TRIED)
    # find those that `top_p` leaves, and where this is certain in float32
    can_be = sums.isfinite()
    is_known = torch.ones_like(can_be)
    if rule.top_p < 1:
        shares = scaled.float().softmax(-1)
        for place in range(TRIED):
            own = scaled.gather(-1, ids[:, place : place + 1])
            least = shares.masked_fill(scaled <= own, 0).sum(-1)
            most = shares.masked_fill(scaled < own, 0).sum(-1) - shares.gather(-1, ids)[:, place]
            is_in, is_out = most < rule.top_p - UNSURE, least > rule.top_p + UNSURE
            can_be[:, place] &= ~is_out
            is_known[:, place] = is_in | is_out
            # on a CPU, an early end costs no waiting
            if scaled.device.type == "cpu" and bool(is_in.all()):
                break
    # the first possible token wins, if float32 is certain about this token and all before it
    first = can_be.long().argmax(-1, keepdim=True)
    is_sure = can_be.gather(-1, first) & is_known.cumprod(-1).gather(-1, first).bool()
    return ids.gather(-1, first).masked_fill(~is_sure, REDO)


def _possible(scaled: torch.Tensor, rule: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the likeliest tokens, -inf for excluded ones, and their ids, [n, t]."""
    size = scaled.shape[-1]
    if rule.top_k is not None and rule.top_k < size:
        # keep tokens that are as likely as the last one
        least = scaled.topk(rule.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    if rule.top_k is None and rule.top_p == 1:
        values, ids = scaled, torch.arange(size, device=scaled.device).expand_as(scaled)
    else:
        # in descending order, exclude the tokens after the first ones that sum to `top_p`
        left = int((scaled != -math.inf).sum(-1).max())
        values, ids, _ = likeliest(scaled, left)
        shares = (values - scaled.logsumexp(-1, keepdim=True)).exp()
        excluded = shares.cumsum(-1) - shares >= rule.top_p
        excluded[:, 0] = False
        values = values.masked_fill(excluded, -math.inf)
    if rule.min_p:
        values = values.masked_fill(values < math.log(rule.min_p), -math.inf)
    return values, ids


def likeliest(
    logits: torch.Tensor, top: int, *, exact: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the `top` highest logits, their token ids, [n, t] each, and ties to resolve, [n, 1].

    Equal logits are in the order of token ids, on every device. ``topk`` may return any of several
    equal logits. So if it leaves out a logit that equals its last one, the row has a tie. With
    `exact`, ties are resolved at once. Otherwise, such a row is True in the last result.
    """
    top = min(top, logits.shape[-1])
    values, ids = logits.topk(min(top + 1, logits.shape[-1]))
    last = values[:, top - 1 : top]
    is_tied = ((values[:, top:] == last) & last.isfinite()).any(-1, keepdim=True)
    if exact and bool(is_tied.any()):
        # keep all tokens above the last value, and the first ones of those that equal it
        above, equal = logits > last, logits == last
        left = top - above.sum(-1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(-1) <= left))
        ids = chosen.to(torch.uint8).topk(top).indices
        values = logits.gather(-1, ids)
    # sort by token id, and then by logit
    ids, order = ids[:, :top].sort(dim=-1)
    values, by_value = values[:, :top].gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value), is_tied


def signed(hashes: Sequence[int]) -> torch.Tensor:
    """Return hashes from 0 to 2^64 - 1 as signed integers, because torch needs these."""
    return torch.tensor([_signed(value) for value in hashes])


def _signed(value: int) -> int:
    return value - (value >> 63 << 64)


def noise(bits: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise from the hash of a text XOR that of the token after it (`signed`)."""
    uniform = _shifted(mix(bits), 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def mix(bits: torch.Tensor) -> torch.Tensor:
    """Overwrite and return `bits`, so that every one of 64 bits depends on all of them.

    This is a step of splitmix64 (Steele et al., OOPSLA 2014). Integers of torch wrap around.
    """
    bits += _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= _shifted(bits, shift)
        bits *= _signed(factor)
    bits ^= _shifted(bits, 31)
    return bits


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift bits to the right, and fill in zeros, also for negative numbers."""
    return (bits >> shift).bitwise_and_((1 << 64 - shift) - 1)
