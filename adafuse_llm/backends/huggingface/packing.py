"""Run one forward pass over tokens of many requests. Each token attends only to its own request.

One sequence contains the tokens of all requests, so the model computes everything except attention
for all requests at once. The model gets a `PackedCache`, whose `update` adds the new rows to the
rows of each request. During the pass, the model's attention is the function `attend`, which this
module registers in transformers' ``AttentionInterface``. It finds the cache of the pass that runs
in its thread, and makes one call of PyTorch's attention per request. Outside such a pass, it is the
same as ``"sdpa"``, so a model that runs in several threads works in all of them.

Shapes: T tokens of the pass; h query heads, k key/value heads of size d.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adafuse_llm.backends.huggingface.architecture import PACKED
from adafuse_llm.backends.huggingface.attention import PieceAttention, Rows
from adafuse_llm.backends.huggingface.pieces import Piece
from adafuse_llm.errors import UnsupportedModelError


class PackedCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of one pass over pieces of several requests, and the attention of the pass.

    Args:
        pieces: the pieces, in the order of their tokens.
        windows: number of tokens that each sliding layer sees, by layer index.
    """

    def __init__(self, pieces: Sequence[Piece], windows: Mapping[int, int]) -> None:
        super().__init__(layers=[])
        self._windows = windows
        self._caches = [piece.cache for piece in pieces]
        self._sizes = [len(piece.tokens) for piece in pieces]
        self._attentions = [PieceAttention(piece) for piece in pieces]
        # What the layer that runs has cached, until it attends: its keys, all rows, its window.
        self._layer: tuple[torch.Tensor, list[Rows], int | None] | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new rows, [1, k, T, d], to those of their requests, and return them."""
        new = (states.split_with_sizes(self._sizes, dim=2) for states in (key_states, value_states))
        rows = [
            cache.update(keys, values, layer_idx)
            for cache, keys, values in zip(self._caches, *new, strict=True)
        ]
        self._layer = key_states, rows, self._windows.get(layer_idx)
        return key_states, value_states

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the results of a layer, [1, T, h, d].

        Args:
            query: the queries, [1, h, T, d].
            key: the keys that `update` returned, [1, k, T, d].
            scaling: factor of the attention scores; None for the default.
            kwargs: the other arguments of attention functions.

        Raises:
            UnsupportedModelError: the layer changes the keys that it caches, or its attention is
                not the usual one.
        """
        unusual = [name for name in UNUSUAL if kwargs.get(name) is not None]
        if self._layer is None or key is not self._layer[0] or unusual:
            raise UnsupportedModelError(
                f"the attention layers use {', '.join(unusual) or 'other keys than they cache'}"
            )
        _, rows, window = self._layer
        self._layer = None
        outputs = [
            attention(part, keys, values, window, scaling).transpose(1, 2)
            for attention, part, (keys, values) in zip(
                self._attentions, query.split_with_sizes(self._sizes, dim=2), rows, strict=True
            )
        ]
        return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def check_read(self) -> None:
        """Raise an error if a layer has cached rows but not called `attend` afterwards."""
        if self._layer is not None:
            raise UnsupportedModelError("the attention layers do not use AttentionInterface")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0. The model does not need the length, because it gets positions and masks."""
        return 0


UNUSUAL = ("softcap", "position_bias", "s_aux")
"""Arguments of attention functions that change the scores. ``"sdpa"`` does not support them either,
or needs a mask for them."""


class _Running(threading.local):
    """The cache of the packed pass that runs in this thread; None if there is none."""

    cache: PackedCache | None = None


_running = _Running()


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute the attention of a layer in the form that transformers expects."""
    if _running.cache is not None:
        return _running.cache.attend(query, key, **kwargs), None
    result: tuple[torch.Tensor, Any] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, **kwargs
    )
    return result


AttentionInterface.register(PACKED, attend)
AttentionMaskInterface.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


class _Switch:
    """Switches the attention of models while packed passes run, which may be several at a time."""

    def __init__(self) -> None:
        self._users: dict[int, tuple[int, str | None]] = {}  # passes, and the usual attention
        self._lock = threading.Lock()

    def on(self, config: PreTrainedConfig) -> None:
        with self._lock:
            passes, usual = self._users.get(id(config), (0, config._attn_implementation))
            self._users[id(config)] = passes + 1, usual
            config._attn_implementation_internal = PACKED  # as transformers does for one config

    def off(self, config: PreTrainedConfig) -> None:
        with self._lock:
            passes, usual = self._users.pop(id(config))
            if passes > 1:
                self._users[id(config)] = passes - 1, usual
            else:
                config._attn_implementation_internal = usual


_switch = _Switch()


def configs_of(model: torch.nn.Module) -> list[PreTrainedConfig]:
    """Return the configurations in which the layers of a model look up their attention."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(each): each for each in found if isinstance(each, PreTrainedConfig)}.values())


@contextmanager
def packed(configs: Sequence[PreTrainedConfig], cache: PackedCache) -> Iterator[None]:
    """Let a model attend with `cache` in this thread.

    Args:
        configs: the configurations of the model, from `configs_of`.
        cache: the cache of the pass.
    """
    for config in configs:
        _switch.on(config)
    _running.cache = cache
    try:
        yield
    finally:
        _running.cache = None
        for config in configs:
            _switch.off(config)
