"""Large members that behave like embedded ones, to measure what real sizes cost.

Random-weight members never agree, and trained members of a real size do not ship with this project.
`widen` pads an embedded member with zeros to any width and depth. The added parts compute as much
as trained ones would, but they do not change the results, so the members agree as often as the
embedded members do.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def widen(
    source: Path, target: Path, *, width: int, inner: int, layers: int, endless: bool = True
) -> Path:
    """Write a wider and deeper copy of an embedded member (Qwen 3 or OLMo 2) to a folder.

    Args:
        source: folder of the embedded member.
        target: folder to create.
        width: hidden size, a multiple of the size of an attention head.
        inner: hidden size of the MLPs.
        layers: number of layers.
        endless: whether the copy never writes special tokens, so that responses do not end.

    Returns:
        The target.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in ("qwen3", "olmo2"):
        raise ValueError(f"a member of type {config['model_type']!r} cannot be widened")
    old, depth = config["hidden_size"], config["num_hidden_layers"]
    state = {
        name: _widened(name, value, old, width, inner)
        for name, value in load_file(source / "model.safetensors").items()
    }
    first = {name: value for name, value in state.items() if ".layers.0." in name}
    for layer in range(depth, layers):
        for name, value in first.items():
            adds = _kind(name) in ("o_proj", "down_proj")  # without these, a layer changes nothing
            copy = torch.zeros_like(value) if adds else value.clone()
            state[name.replace(".layers.0.", f".layers.{layer}.")] = copy
    if endless:
        out = state["model.embed_tokens.weight"].clone()
        out[_special_ids(source)] = 0  # a logit of 0 is far below those of words
        state["lm_head.weight"] = out
    head = config.get("head_dim") or old // config["num_attention_heads"]
    config.update(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // head,
        num_key_value_heads=width // head,
        rms_norm_eps=config["rms_norm_eps"] * old / width,
        tie_word_embeddings=not endless,
    )
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * layers
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _widened(name: str, value: torch.Tensor, old: int, width: int, inner: int) -> torch.Tensor:
    """Pad one tensor of a member with zeros."""
    kind = _kind(name)
    if kind in ("q_proj", "k_proj", "v_proj", "o_proj"):
        return _padded(value, (width, width))
    if kind == "down_proj":
        return _padded(value, (width, inner))
    if kind in ("gate_proj", "up_proj"):
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((inner, width), generator=generator) * value.std()
        noise[: value.shape[0]] = 0  # the zeros of down_proj hide the other rows
        return noise + _padded(value, (inner, width))
    if value.ndim == 2:
        return _padded(value, (value.shape[0], width))
    if len(value) != old:
        return value  # a norm of the values of one head
    # The mean over the padded values is smaller, so the norm makes them larger.
    return _padded(value[None] * math.sqrt(old / width), (1, width))[0]


def _kind(name: str) -> str:
    return name.split(".")[-2]


def _padded(value: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    padded = torch.zeros(shape, dtype=value.dtype)
    padded[: value.shape[0], : value.shape[1]] = value
    return padded


def _special_ids(source: Path) -> list[int]:
    tokenizer: dict[str, Any] = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    return [token["id"] for token in tokenizer["added_tokens"]]
