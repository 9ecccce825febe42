"""The freshly initialized model of a recipe, and the optimizer of its weight matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

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


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates (Jordan et al. 2024), in float32.

    The optimizer updates parameters of the same shape together. ``torch.optim.Muon`` computes in
    bfloat16, which is slow on CPUs.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Apply one update to every parameter with a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    assert parameter.grad is not None
                    state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
                whitened = orthogonalize(torch.stack(updates))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, whitened, strict=True):
                    parameter.sub_(update, alpha=scale)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Move the singular values of each matrix toward 1 with five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    whitened: Tensor = x.mT if tall else x
    return whitened
