"""Make the linear layers of a model faster in passes over a few tokens on a CPU.

PyTorch's ``linear`` computes x Wᵀ. In float32, it reads or repacks the weights W several times if
x has a few rows, so a pass over two tokens takes as long as two passes. As (W xᵀ)ᵀ, the same
product reads the weights once. A pass of a model with 0.5 B parameters over four tokens then takes
1.6 times as long as one over a single token, instead of 2.4 times (docs/speed.md).

Shapes: n tokens, i input features, o output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

MAX_ROWS = 8
"""Maximum number of rows of x for which (W xᵀ)ᵀ is faster."""

MIN_WEIGHTS = 100_000
"""Minimum number of weights for which (W xᵀ)ᵀ is faster."""


@contextmanager
def few_rows(layers: Sequence[Any], tokens: int) -> Iterator[None]:
    """Make `layers` faster during a pass, if it runs over 2 to `MAX_ROWS` tokens."""
    changed = layers if 1 < tokens <= MAX_ROWS else []
    for layer in changed:
        layer.__dict__["forward"] = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in changed:
            layer.__dict__.pop("forward", None)


def slow_layers(model: nn.Module) -> list[Any]:
    """Return the linear layers of a model that are slow in passes over a few tokens."""
    return [layer for layer in model.modules() if _is_slow(layer)]


def _is_slow(layer: Any) -> bool:
    # a hook of accelerate may have replaced `forward`
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return False
    weight = layer.weight
    is_large = weight.numel() >= MIN_WEIGHTS
    return is_large and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs [..., n, o] of a layer for inputs [..., n, i]."""
    rows = x.flatten(0, -2)
    if not 1 < len(rows) <= MAX_ROWS:
        return functional.linear(x, layer.weight, layer.bias)
    product = (layer.weight @ rows.t()).t().contiguous().view(*x.shape[:-1], -1)
    return product if layer.bias is None else product + layer.bias
