"""Checkpoints: which tensors they must have, and what is not loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from adafuse_llm import AdaFuseEngine, LoadError, TransformersMember
from adafuse_llm.embedded import member_paths
from adafuse_llm.loading import huggingface
from tests.support.models import Recipe, model, tokenizer

Weights = dict[str, torch.Tensor]


def load(member: Path | str | TransformersMember) -> AdaFuseEngine:
    return AdaFuseEngine.from_pretrained(
        [member if isinstance(member, TransformersMember) else str(member)]
    )


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.quick
@pytest.mark.parametrize(
    "names",
    [
        ["lm_head.weight"],
        ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"],
    ],
)
def test_a_checkpoint_with_missing_tensors_is_refused(copy: Path, names: list[str]) -> None:
    change_weights(copy, lambda weights: {n: w for n, w in weights.items() if n not in names})
    with pytest.raises(LoadError) as caught:
        load(copy)
    message = str(caught.value)
    assert "member 'spoiled'" in message
    assert f"{len(names)} tensor" in message
    assert all(name in message for name in names)
    assert "\n" not in message


def test_a_config_with_more_layers_than_the_checkpoint_is_refused(copy: Path) -> None:
    change_config(copy, num_hidden_layers=3)
    with pytest.raises(LoadError, match=r"9 tensors \(model\.layers\.2\..*, \.\.\.\) missing"):
        load(copy)


def test_a_tensor_of_the_wrong_shape_is_named(copy: Path) -> None:
    change_config(copy, intermediate_size=40)
    with pytest.raises(
        LoadError, match=r"mlp\.down_proj\.weight \[32, 48\] instead of \[32, 40\].*wrong shape"
    ):
        load(copy)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "vision_tower.layers.0.mlp.up_proj.weight",
    ],
)
def test_other_tensors_than_the_models_do_not_prevent_loading(copy: Path, name: str) -> None:
    change_weights(copy, lambda weights: {**weights, name: torch.ones(4)})
    load(copy).close()


def test_names_without_the_prefix_of_the_base_model_load(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    model(Recipe("gpt2")).save_pretrained(folder)
    tokenizer("bytelevel").save_pretrained(folder)
    change_weights(folder, lambda found: {n.removeprefix("transformer."): found[n] for n in found})
    load(folder).close()


@pytest.mark.parametrize("form", ["quantized while loading", "quantized checkpoint"])
def test_a_quantized_member_with_missing_tensors_is_refused(form: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True)
    folder = tmp_path / "quantized"
    shutil.copytree(member_paths()[0], folder)
    spec = TransformersMember(path=str(folder), quantization_config=quantization)
    if form == "quantized checkpoint":
        made = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization
        )
        made.save_pretrained(folder)
        spec = TransformersMember(path=str(folder))
    load(spec).close()
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda weights: {n: w for n, w in weights.items() if name not in n})
    # transformers fails on quantized tensors that it cannot fill, before it reports them
    named = name.replace(".", r"\.") if form == "quantized while loading" else "'quantized'"
    with pytest.raises(LoadError, match=named):
        load(spec)


@pytest.mark.quick
def test_an_index_that_names_pickled_weights_runs_no_code(copy: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(copy / "ran"), "w")

    torch.save({"lm_head.weight": Evil()}, copy / "pytorch_model.bin")
    names = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "pytorch_model.bin")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match="'spoiled'"):
        load(copy)
    assert not (copy / "ran").exists()


def test_models_of_the_hubs_cache_load(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = copy.parent / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    copy.rename(repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(copy.parent / "hub"))
    load("someone/tiny").close()


def test_an_adapter_is_not_ignored(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(huggingface, "find_spec", lambda _name: None)
    with pytest.raises(LoadError, match=r"adapter.*peft.*merge_and_unload"):
        load(copy)
