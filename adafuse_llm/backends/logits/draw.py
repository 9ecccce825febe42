"""Draw tokens from logits by the rule of `adafuse_llm.tree.sampling`, for many nodes at a time.

Shapes: n nodes, v vocabulary, t likeliest tokens. Draws use float64, so that rounding decides
nothing.
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
"""Size of a vocabulary for which exact draws cost next to nothing."""

TRIED = 3
"""Number of tokens that a fast draw holds against `top_p`."""

UNSURE = 1e-5
"""Difference of probabilities that float32 cannot tell apart."""

NONE, REDO = -1, -2
"""What stands in the place of a token: no draw, or a draw that must be done again, exactly."""


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
        exact: whether to finish every draw. Otherwise, the few that take long are `REDO`, so that
            nothing waits for the device.
    """
    codes = codes.to(logits.device)
    tokens = torch.full((len(draws), 1), NONE, device=logits.device)
    # nodes with the same rule draw together
    groups: dict[Draw, dict[int, int]] = defaultdict(dict)
    for row, draw in enumerate(draws):
        if draw is not None:
            groups[replace(draw, key=0)][row] = draw.key
    for rule, keys in groups.items():
        rows = to_device(torch.tensor(list(keys)), logits.device)
        hashes = to_device(signed(list(keys.values())), logits.device)[:, None]
        # after a word, only these tokens can follow
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

    The log-probabilities after the temperature, [n, v], have 0 as the highest of a row.
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
    """Do the same without `top_k`, and without an order of the vocabulary, or return `REDO`.

    The first token that `top_p` leaves is drawn: tokens that it excludes do not change the order of
    the others.
    """
    # the tokens with the highest sums of log-probability and noise
    sums = noise(hashes ^ codes).add_(scaled)
    if is_end is not None:
        sums = sums.masked_fill(~is_end, -math.inf)
    if rule.min_p:
        sums = sums.masked_fill(scaled < math.log(rule.min_p), -math.inf)
    sums, ids = sums.topk(TRIED)
    # which of them `top_p` leaves, and where float32 tells that for sure
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
            # on a CPU, it costs nothing to ask
            if scaled.device.type == "cpu" and bool(is_in.all()):
                break
    # the first one that can be drawn: all before it are surely excluded, and it surely is not
    first = can_be.long().argmax(-1, keepdim=True)
    is_sure = can_be.gather(-1, first) & is_known.cumprod(-1).gather(-1, first).bool()
    return ids.gather(-1, first).masked_fill(~is_sure, REDO)


def _possible(scaled: torch.Tensor, rule: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest values and their ids, [n, t]; minus infinity for excluded tokens."""
    size = scaled.shape[-1]
    if rule.top_k is not None and rule.top_k < size:
        # equally likely tokens stay
        least = scaled.topk(rule.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    if rule.top_k is None and rule.top_p == 1:
        values, ids = scaled, torch.arange(size, device=scaled.device).expand_as(scaled)
    else:
        # in the order of their probabilities, those after the first ones with `top_p` are excluded
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
    """Return the `top` highest logits and their token ids, [n, t] each, and where they are tied.

    Equal logits are ordered by token id, whatever the device. ``topk`` may return any of them, so
    a row is looked at again where the first logit that it leaves out equals the last one that it
    returns: at once with `exact`, else by the caller, who gets such rows as True, [n, 1].
    """
    top = min(top, logits.shape[-1])
    values, ids = logits.topk(min(top + 1, logits.shape[-1]))
    last = values[:, top - 1 : top]
    is_tied = ((values[:, top:] == last) & last.isfinite()).any(-1, keepdim=True)
    if exact and bool(is_tied.any()):
        # all tokens above the last value, and of those that equal it the first ones
        above, equal = logits > last, logits == last
        left = top - above.sum(-1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(-1) <= left))
        ids = chosen.to(torch.uint8).topk(top).indices
        values = logits.gather(-1, ids)
    # by token id, and then by logit
    ids, order = ids[:, :top].sort(dim=-1)
    values, by_value = values[:, :top].gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value), is_tied


def signed(hashes: Sequence[int]) -> torch.Tensor:
    """Return hashes from 0 to 2^64 - 1 as integers with a sign, which torch supports."""
    return torch.tensor([_signed(value) for value in hashes])


def _signed(value: int) -> int:
    return value - (value >> 63 << 64)


def noise(bits: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise from hashes of texts, XOR hashes of the tokens after them (`signed`)."""
    uniform = _shifted(mix(bits), 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def mix(bits: torch.Tensor) -> torch.Tensor:
    """Return 64 bits in which every bit depends on every bit of `bits`, which are overwritten.

    This is a step of splitmix64 (Steele et al., OOPSLA 2014). Integers of torch wrap around.
    """
    bits += _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= _shifted(bits, shift)
        bits *= _signed(factor)
    bits ^= _shifted(bits, 31)
    return bits


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift bits to the right, filled with zeros whatever the sign."""
    return (bits >> shift).bitwise_and_((1 << 64 - shift) - 1)
