"""Read the properties of a transformers model from its configuration.

Shapes: n new tokens, r rows of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from adafuse_llm.backends.file_facts import window_in
from adafuse_llm.backends.huggingface.pieces import Piece
from adafuse_llm.backends.logits.rows import to_device

ROW_COUNTING = ("attention_chunk_size", "attention_types", "alibi", "attn_config")
"""Configuration entries of models (Llama 4, GPT-Neo, Falcon, MPT) whose attention uses the index of
a token's row in the cache as the token's position. In tree attention, the index and the position
differ."""


PACKED = "adafuse_llm"
"""Name of the attention of packed passes in transformers. A model in another thread may have it."""


@dataclass(frozen=True)
class Attention:
    """The format of the tree masks that a model's attention layers accept.

    Args:
        layer_types: types of the layers: ``full_attention``, ``sliding_attention`` or both.
        windows: number of tokens that each sliding layer sees, by layer index. All sliding layers
            have the same window.
        additive: whether the model adds masks to attention scores (eager attention). Otherwise
            masks are boolean.
        dtype: dtype of additive masks.
        device: device of the masks.
    """

    layer_types: frozenset[str]
    windows: Mapping[int, int]
    additive: bool
    dtype: torch.dtype
    device: torch.device

    def mask(self, piece: Piece) -> Any:
        """Build the attention mask for the model, [1, 1, n, r].

        For a model with both layer types, the result is a mapping from layer type to mask.
        """
        masks = {}
        for kind in self.layer_types:
            window = next(iter(self.windows.values())) if kind == "sliding_attention" else None
            visible = piece.sight(window)
            allowed = to_device(torch.from_numpy(visible), self.device)[None, None]
            masks[kind] = self._additive(allowed) if self.additive else allowed
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, allowed: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed, lowest)


def tree_attention(model: Any, device: torch.device) -> Attention | None:
    """Return the format of a model's tree masks; None if the model accepts no tree masks."""
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager", PACKED):
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
    windows = _windows(layers)
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


def sliding_windows(model: Any) -> frozenset[int]:
    """Return the sliding windows of a model's layers, in tokens."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return frozenset(_windows(layers).values())


def _windows(layers: Sequence[Any]) -> dict[int, int]:
    """Return the windows of the layers of a cache that have one, by layer index."""
    return {
        index: int(layer.sliding_window)
        for index, layer in enumerate(layers)
        if isinstance(layer, DynamicSlidingWindowLayer)
    }


def rotary_positions(model: Any) -> tuple[frozenset[str], int | None]:
    """Return the kinds of rotary positions, and the length at which their frequencies change.

    Layers of different types may have different kinds (Gemma 3). In a sequence above the length, a
    model with "longrope" positions (Phi-3) uses other frequencies for all tokens, so cached rows
    become invalid. For other kinds, the length is None. The frequencies of "dynamic" positions
    change only beyond the context window, which no sequence exceeds.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layers = [layer for layer in rope.values() if isinstance(layer, Mapping)] or [rope]
    kinds = [str(layer.get("rope_type", layer.get("type"))) for layer in layers]
    edges = [
        layer.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for layer, kind in zip(layers, kinds, strict=True)
        if kind == "longrope"
    ]
    return frozenset(kinds), min(filter(None, edges), default=None)


def context_window(model: Any) -> int | None:
    """Return the maximum number of tokens in a sequence, prompt included; None for no limit."""
    config = model.config.get_text_config(decoder=True)
    return window_in(lambda entry: getattr(config, entry, None))


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence ids of the generation config, the config and the tokenizer."""
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return frozenset(token for token in eos_ids(sources) if 0 <= token < vocabulary)


def eos_ids(sources: Iterable[Any]) -> set[int]:
    """Return the end-of-sequence ids of configurations and tokenizers."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, (list, tuple)):
            ids.update(int(token) for token in value)
    return ids
