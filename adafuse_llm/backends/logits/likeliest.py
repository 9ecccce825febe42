"""The likeliest tokens of logits, in an order that does not depend on the device.

Shapes: n nodes, v vocabulary, t likeliest tokens.
"""

from __future__ import annotations

import torch


def likeliest(
    logits: torch.Tensor, top: int, *, by_sorting: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the `top` highest logits and their token ids. Equal logits are ordered by token id.

    If several logits are equal, ``topk`` may return any of them. So this function requests one more
    value than it returns. If the additional value equals the last returned value, a lower id may be
    missing. With `by_sorting`, no id is missing.

    Returns:
        The logits and their ids, [n, t] each; and whether a lower id may be missing, [n, 1].
    """
    top = min(top, logits.shape[-1])
    if by_sorting:
        tokens = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        return logits.gather(-1, tokens), tokens, torch.zeros_like(tokens[:, :1], dtype=torch.bool)
    values, tokens = logits.topk(min(top + 1, logits.shape[-1]))
    tied = (values[:, top:] == values[:, top - 1 : top]).any(-1, keepdim=True)
    tokens, order = tokens[:, :top].sort(dim=-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, by_value), tied
