"""Build the freshly initialized model of a recipe."""

from __future__ import annotations

from typing import Any

import torch

from training.recipes import CONTEXT, Recipe


def build_model(recipe: Recipe, tokenizer: Any, seed: int) -> Any:
    """Build a freshly initialized float32 model; the recipe and the seed determine its weights."""
    from transformers import (
        Olmo2Config,
        Olmo2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        StableLmConfig,
        StableLmForCausalLM,
    )

    head = recipe.width // recipe.heads
    ids = dict(
        zip(recipe.control, tokenizer.convert_tokens_to_ids(list(recipe.control)), strict=True)
    )
    stops = list(dict.fromkeys([ids[recipe.end], ids[recipe.eos]]))
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.width,
        "intermediate_size": recipe.inner,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None if recipe.bos is None else ids[recipe.bos],
        "eos_token_id": stops,
        "pad_token_id": ids[recipe.pad],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any
        match recipe.architecture:
            case "qwen3":
                model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=head))
            case "stablelm":
                rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
                config = StableLmConfig(**shape, qk_layernorm=True, rope_parameters=rope)
                model = StableLmForCausalLM(config)
            case "olmo2":
                model = Olmo2ForCausalLM(Olmo2Config(**shape))
    model.generation_config.eos_token_id = stops
    model.generation_config.pad_token_id = ids[recipe.pad]
    model.generation_config.bos_token_id = shape["bos_token_id"]
    return model.float()
