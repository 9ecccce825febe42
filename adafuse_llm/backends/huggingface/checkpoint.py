"""Read the settings of a checkpoint: adjustments, ignored settings, end-of-sequence ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adafuse_llm.tree.adjustment import FORBIDDEN, NOTHING, Adjustment

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
"""Other settings that members do not follow. The values here, and ``None``, have no effect."""


def own_adjustment(model: Any, end_ids: frozenset[int]) -> Adjustment:
    """Return the changes of distributions that a model's generation config sets.

    As in transformers, ``bad_words_ids`` cannot forbid a token of `end_ids`.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return NOTHING
    biases = getattr(config, "sequence_bias", None) or {}
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    bad_words = [tuple(ids) for ids in getattr(config, "bad_words_ids", None) or ()]
    return Adjustment(
        repetition_penalty=getattr(config, "repetition_penalty", None) or 1.0,
        no_repeat_ngram_size=getattr(config, "no_repeat_ngram_size", None) or 0,
        min_new_tokens=getattr(config, "min_new_tokens", None) or 0,
        biases=tuple((tuple(ids), max(-FORBIDDEN, min(FORBIDDEN, bias))) for ids, bias in pairs),
        bad_words=tuple(ids for ids in bad_words if ids not in {(end,) for end in end_ids}),
        suppressed=_tokens(getattr(config, "suppress_tokens", None)),
        suppressed_first=_tokens(getattr(config, "begin_suppress_tokens", None)),
    )


def ignored_settings(model: Any) -> dict[str, Any]:
    """Return the settings of a generation config that would change texts, but are ignored."""
    config = getattr(model, "generation_config", None)
    values = {name: getattr(config, name, None) for name in (*OTHERS, *OF_SAMPLING)}
    changed = {n: value for n, value in values.items() if value not in (None, OTHERS.get(n))}
    draws = "do_sample" in changed
    return {n: value for n, value in changed.items() if draws or n not in OF_SAMPLING}


def eos_ids(sources: Iterable[Any]) -> set[int]:
    """Return all end-of-sequence ids that are set in configurations and tokenizers."""
    values = [getattr(source, "eos_token_id", None) for source in sources]
    lists = [[value] if isinstance(value, int) else value or () for value in values]
    return {token for ids in lists for token in ids}


def _tokens(ids: Iterable[int] | None) -> tuple[int, ...]:
    return tuple(int(token) for token in ids or () if token >= 0)
