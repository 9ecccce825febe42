"""Read what the configurations of a checkpoint say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adafuse_llm.adjustment import FORBIDDEN, NOTHING, Adjustment

OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Settings that have an effect only if ``do_sample`` is true."""

OTHERS: Mapping[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "max_new_tokens": None,
    "min_length": 0,
    "stop_strings": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "watermarking_config": None,
}
"""Other settings that members do not follow, with the values that change nothing, besides None."""


def own_adjustment(model: Any, end_ids: frozenset[int]) -> Adjustment:
    """Return the changes of distributions that the generation config of a model asks for.

    Args:
        model: the model.
        end_ids: the member's end-of-sequence ids, which no list of bad words forbids.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return NOTHING
    biases = getattr(config, "sequence_bias", None) or {}
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    bad_words = [tuple(each) for each in getattr(config, "bad_words_ids", None) or ()]
    return Adjustment(
        repetition_penalty=getattr(config, "repetition_penalty", None) or 1.0,
        no_repeat_ngram_size=getattr(config, "no_repeat_ngram_size", None) or 0,
        min_new_tokens=getattr(config, "min_new_tokens", None) or 0,
        biases=tuple((tuple(ids), max(-FORBIDDEN, min(FORBIDDEN, bias))) for ids, bias in pairs),
        bad_words=tuple(each for each in bad_words if each not in {(end,) for end in end_ids}),
        suppressed=_tokens(getattr(config, "suppress_tokens", None)),
        suppressed_first=_tokens(getattr(config, "begin_suppress_tokens", None)),
    )


def ignored_settings(model: Any) -> dict[str, Any]:
    """Return the settings of a model's generation config that change texts and are not followed."""
    config = getattr(model, "generation_config", None)
    values = {name: getattr(config, name, None) for name in (*OTHERS, *OF_SAMPLING)}
    found = {n: value for n, value in values.items() if value not in (None, OTHERS.get(n))}
    if "do_sample" not in found:
        found = {name: value for name, value in found.items() if name not in OF_SAMPLING}
    return found


def rope_edge(config: Any) -> int | None:
    """Return the length beyond which all rows of a sequence change; None if there is none.

    In a longer sequence, a model with "longrope" positions (Phi-3) uses other rotary frequencies
    for all tokens. Layers of different types may have different positions (Gemma 3). The
    frequencies of "dynamic" positions change only beyond the context window, which no sequence
    exceeds.

    Args:
        config: the model's text configuration.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layers = [layer for layer in rope.values() if isinstance(layer, Mapping)] or [rope]
    edges = [
        layer.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for layer in layers
        if layer.get("rope_type", layer.get("type")) == "longrope"
    ]
    return min(filter(None, edges), default=None)


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


def _tokens(ids: Iterable[int] | None) -> tuple[int, ...]:
    return tuple(int(token) for token in ids or () if token >= 0)
