"""What the configuration of a transformers model says about it.

Shapes: n new tokens, r rows of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from adafuse_llm.backends.huggingface.kv import to_device
from adafuse_llm.backends.huggingface.packing import Piece

ROW_COUNTING = ("attention_chunk_size", "attention_types", "alibi", "attn_config")
"""Configuration entries of models (Llama 4, GPT-Neo, Falcon, MPT) whose attention counts rows of
the cache where tree attention needs positions."""


@dataclass(frozen=True)
class Attention:
    """How a model's attention layers take a tree mask.

    Args:
        layer_types: which of ``full_attention`` and ``sliding_attention`` the layers have.
        windows: tokens that a sliding layer sees, by its index; the same for all of them.
        additive: whether masks are added to attention scores (eager attention) or boolean.
        dtype: of additive masks.
        device: where the model takes masks.
    """

    layer_types: frozenset[str]
    windows: Mapping[int, int]
    additive: bool
    dtype: torch.dtype
    device: torch.device

    def mask(self, piece: Piece) -> Any:
        """The attention mask for the model: [1, 1, n, r], or one such mask by layer type for
        models that mix them.
        """
        masks = {}
        for kind in self.layer_types:
            window = next(iter(self.windows.values())) if kind == "sliding_attention" else None
            seen = piece.sight(window)
            allowed = to_device(torch.from_numpy(seen), self.device)[None, None]
            masks[kind] = self._additive(allowed) if self.additive else allowed
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, allowed: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed, lowest)


def tree_attention(model: Any, device: torch.device) -> Attention | None:
    """How the model takes tree masks; None if its layers do not."""
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager"):
        return None
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds - {"sliding_attention"} or any(getattr(config, n, None) for n in ROW_COUNTING):
        return None
    layers = DynamicCache(config=config).layers
    if not layers or any(
        type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers
    ):
        return None
    windows = {
        index: int(layer.sliding_window)
        for index, layer in enumerate(layers)
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
    if len(set(windows.values())) > 1:
        return None
    return Attention(
        frozenset(
            "sliding_attention" if layer.is_sliding else "full_attention" for layer in layers
        ),
        windows=windows,
        additive=implementation == "eager",
        dtype=model.dtype,
        device=device,
    )


def rotary_positions(model: Any) -> tuple[frozenset[str], int | None]:
    """The kinds of rotary positions, which may differ by layer type (Gemma 3), and the length at
    which a model with "longrope" positions (Phi-3) changes over to another set of frequencies, for
    all of its tokens: what was cached before is worth nothing after.

    Those of "dynamic" ones change beyond the context window, where no sequence gets.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layers = [each for each in rope.values() if isinstance(each, Mapping)] or [rope]
    kinds = [str(each.get("rope_type", each.get("type"))) for each in layers]
    edges = [
        each.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for each, kind in zip(layers, kinds, strict=True)
        if kind == "longrope"
    ]
    return frozenset(kinds), min(filter(None, edges), default=None)


def context_window(model: Any) -> int | None:
    """Return the most tokens that a sequence can have, prompt included; None for no limit."""
    config = model.config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a response: the generation config's, the config's, the tokenizer's."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if isinstance(found, int):
            ids.add(found)
        elif isinstance(found, (list, tuple)):
            ids.update(int(token) for token in found)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return frozenset(token for token in ids if 0 <= token < vocabulary)
