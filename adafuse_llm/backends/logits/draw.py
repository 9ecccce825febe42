"""Draw tokens from logits by the rule of `adafuse_llm.tree.sampling`, for many nodes at a time.

Shapes: n nodes, v vocabulary, t likeliest tokens. Float64 numbers decide every draw.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from adafuse_llm.backends.logits.state import to_device
from adafuse_llm.tree.sampling import Draw

SPARE = 64
"""Number of tokens that a draw reads beyond `top_k`, as they may be as likely as the last one."""

CANDIDATES = 8
"""Number of tokens whose log-probability plus noise a fast draw computes again in float64."""

NOISE_ERROR = 0.05
"""Limit of the amount by which `_quick_noise` is too low. Real errors are below one half of it."""

TRIED = 3
"""Number of candidates for which a fast draw computes whether `top_p` keeps them."""

UNSURE = 1e-5
"""Margin around `top_p` in which float32 sums are too imprecise, so the draw must be repeated."""

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

    The options apply in the order of transformers: temperature, `top_k`, `top_p`, `min_p`.

    Args:
        logits: the logits, [n, v]; minus infinity for tokens that cannot follow.
        draws: how each node draws.
        codes: hashes of the tokens, [v], in the form of `signed`.
        word_ends: ids of the tokens that begin with whitespace or end the response.
        exact: whether to finish every draw. Otherwise, the few draws for which the CPU would
            have to wait for the device are `REDO`.
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
        # after a word, draw only tokens that show the word's end, if any are left
        is_end = None
        if rule.after_word:
            is_end = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            is_end[torch.as_tensor(word_ends, dtype=torch.long)] = True
        chosen = logits.index_select(0, rows)
        if exact or rule.top_k is not None:
            tokens[rows] = _draw(chosen, rule, hashes, codes, is_end, exact=exact)
        else:
            tokens[rows] = _draw_fast(chosen, rule, hashes, codes, is_end)
    return tokens


def _draw(
    logits: torch.Tensor,
    rule: Draw,
    hashes: torch.Tensor,
    codes: torch.Tensor,
    is_end: torch.Tensor | None,
    *,
    exact: bool,
) -> torch.Tensor:
    """Return the token that each row of logits, [n, v], draws, [n, 1]."""
    # keep the likeliest tokens, and those that are as likely as the last of them
    size = logits.shape[-1]
    count = min(rule.top_k or size, size)
    top = min(count + SPARE, size)
    if exact and count < size:
        least = logits.topk(count).values[:, -1:]
        top = size - int((logits < least).sum(-1).min())
    if count == size and rule.top_p == 1:
        values, ids = logits, torch.arange(size, device=logits.device).expand_as(logits)
    else:
        values, ids, _ = likeliest(logits, top, exact=exact)
        values = values.masked_fill(values < values[:, count - 1 : count], -math.inf)
    # tokens that were not read may be as likely as the last one, too
    is_tied = values[:, -1:].isfinite() & (not exact and count < top < size)
    # the log-probabilities after the temperature, each row's highest one shifted to 0
    values = values.double()
    values = (values - values.amax(-1, keepdim=True)).div_(rule.temperature)
    if rule.top_p < 1:
        # in descending order, exclude the tokens after the first ones that sum to `top_p`
        shares = (values - values.logsumexp(-1, keepdim=True)).exp()
        excluded = shares.cumsum(-1) - shares >= rule.top_p
        excluded[:, 0] = False
        values = values.masked_fill(excluded, -math.inf)
    if rule.min_p:
        values = values.masked_fill(values < math.log(rule.min_p), -math.inf)
    if is_end is not None:
        ends = values.masked_fill(~is_end[ids], -math.inf)
        values = torch.where(ends.amax(-1, keepdim=True) > -math.inf, ends, values)
    # the highest sum of log-probability and noise wins
    place = noise(hashes ^ codes[ids]).add_(values).argmax(-1, keepdim=True)
    return ids.gather(-1, place).masked_fill(is_tied, REDO)


def _draw_fast(
    logits: torch.Tensor,
    rule: Draw,
    hashes: torch.Tensor,
    codes: torch.Tensor,
    is_end: torch.Tensor | None,
) -> torch.Tensor:
    """Draw like `_draw`, but without `top_k` and without sorting the vocabulary.

    Of the tokens that the options keep, the one with the highest sum of log-probability and noise
    wins. A row whose winner is not certain is `REDO`.
    """
    # find candidates in float32; rounding can make values equal, but never exchanges two of them
    highest = logits.amax(-1, keepdim=True)
    scaled = (logits - highest).float().div_(rule.temperature)
    sums = _quick_noise(hashes ^ codes).add_(scaled)
    if is_end is not None:
        sums = sums.masked_fill(~is_end, -math.inf)
    sums, ids = sums.topk(min(CANDIDATES, sums.shape[-1]))
    # the sums of all other tokens are below this
    bound = sums[:, -1:].double() + NOISE_ERROR
    # compute the sums of the candidates in float64
    values = (logits.gather(-1, ids).double() - highest).div_(rule.temperature)
    is_left = sums.isfinite()
    if rule.min_p:
        is_left &= values >= math.log(rule.min_p)
    sums = noise(hashes ^ codes[ids]).add_(values).masked_fill_(sums == -math.inf, -math.inf)
    sums, order = sums.topk(min(TRIED, sums.shape[-1]))
    ids, can_be = ids.gather(-1, order), is_left.gather(-1, order)
    is_known = (sums > bound) | bound.isneginf()
    # find the candidates that `top_p` keeps, and those for which float32 is precise enough
    if rule.top_p < 1:
        shares = scaled.softmax(-1)
        for place in range(ids.shape[-1]):
            token = ids[:, place : place + 1]
            own = scaled.gather(-1, token)
            # 0 and 1 in float32, because a product with booleans takes four times as long
            up_to = scaled.clone().ge_(own).mul_(shares).sum(-1, keepdim=True)
            is_in = up_to - shares.gather(-1, token) < rule.top_p - UNSURE
            # on a CPU, this test does not wait for a device
            if scaled.device.type == "cpu" and bool(is_in.all()):
                break
            least = scaled.clone().gt_(own).mul_(shares).sum(-1, keepdim=True)
            is_out = least > rule.top_p + UNSURE
            can_be[:, place : place + 1] &= ~is_out
            is_known[:, place : place + 1] &= is_in | is_out
    # the first possible token wins, if `is_known` is true of it and of all tokens before it
    first = can_be.long().argmax(-1, keepdim=True)
    is_sure = can_be.gather(-1, first) & is_known.cumprod(-1).gather(-1, first).bool()
    return ids.gather(-1, first).masked_fill(~is_sure, REDO)


def likeliest(
    logits: torch.Tensor, top: int, *, exact: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the `top` highest logits and their token ids, [n, t], and which rows tie, [n, 1].

    Equal logits are in the order of token ids, on every device. ``topk`` may return any of several
    equal logits. So if it leaves out a logit that equals its last one, the row has a tie. Only
    with `exact` are ties resolved, for which the CPU waits for the device.
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
    # sort by logit, and equal logits by token id: the second sort is stable
    ids, order = ids[:, :top].sort(dim=-1)
    values, by_value = values[:, :top].gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value), is_tied


def signed(hashes: Sequence[int]) -> torch.Tensor:
    """Return hashes from 0 to 2^64 - 1 as signed integers, because torch needs these."""
    return torch.tensor([_signed(value) for value in hashes])


def _signed(value: int) -> int:
    return value - (value >> 63 << 64)


def noise(bits: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise. `bits`: the key of a draw XOR the hash of a token, both `signed`."""
    uniform = _shifted(mix(bits), 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _quick_noise(bits: torch.Tensor) -> torch.Tensor:
    """Return what `noise` returns, but in float32 and too low by at most `NOISE_ERROR`."""
    # numbers near 1 give the most noise, so compute 1 - number, which keeps their digits
    rest = _shifted(mix(bits).bitwise_not_(), 12).float().add_(0.5).mul_(2.0**-52)
    return rest.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def mix(bits: torch.Tensor) -> torch.Tensor:
    """Mix `bits` in place, so that every one of 64 bits depends on all of them, and return them.

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
