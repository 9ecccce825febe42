"""Checkpoints: which files their weights may be in, and which tensors they must have."""

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

from adafuse_llm import AdaFuseEngine, LoadError, MemberSpec
from adafuse_llm.embedded import member_paths
from adafuse_llm.loading import checkpoint
from tests.support.models import Recipe, model, tokenizer

Weights = dict[str, torch.Tensor]

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of files that `torch.load` was called with."""
    files: list[Any] = []

    def record(file: Any, *_arguments: Any, **_options: Any) -> Weights:
        files.append(file)
        raise AssertionError("a file was unpickled")

    monkeypatch.setattr(torch, "load", record)
    return files


def load(member: Path | str | MemberSpec) -> AdaFuseEngine:
    return AdaFuseEngine.from_pretrained(
        [member if isinstance(member, MemberSpec) else str(member)]
    )


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def write_index(folder: Path, name: str, file: object) -> None:
    """Write an index that says that all tensors are in `file`."""
    tensors = load_file(member_paths()[0] / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
    (folder / name).write_text(json.dumps(index))


# Tensors --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("arch", ["gpt2", "mamba"])
def test_a_checkpoint_with_more_layers_than_its_config_is_refused(
    arch: str, tmp_path: Path
) -> None:
    folder = tmp_path / arch
    model(Recipe(arch)).save_pretrained(folder)
    tokenizer("bytelevel").save_pretrained(folder)
    change_config(folder, **{"n_layer" if arch == "gpt2" else "num_hidden_layers": 1})
    with pytest.raises(LoadError, match=r"\.1\.\S+.* of layers that config\.json does not have"):
        load(folder)


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


def test_a_layer_for_speculative_decoding_does_not_prevent_loading(copy: Path) -> None:
    def add(weights: Weights) -> Weights:
        layer = {
            name.replace("layers.1.", "layers.2."): weight.clone()
            for name, weight in weights.items()
            if "layers.1." in name
        }
        return {**weights, **layer, "model.layers.2.eh_proj.weight": torch.ones(4)}

    change_weights(copy, add)
    load(copy).close()


def test_names_without_the_prefix_of_the_base_model_load(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    torch.manual_seed(0)
    known = tokenizer("bytelevel")
    config = transformers.GPT2Config(vocab_size=len(known), n_embd=32, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    known.save_pretrained(folder)

    def rename(weights: Weights) -> Weights:
        named = {name.removeprefix("transformer."): each for name, each in weights.items()}
        return {**named, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}

    change_weights(folder, rename)
    load(folder).close()
    change_config(folder, n_layer=1)
    with pytest.raises(LoadError, match="of layers that"):
        load(folder)


# Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["quantized while loading", "quantized checkpoint"])
def test_a_quantized_member_with_missing_tensors_is_refused(form: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True)
    folder = tmp_path / "quantized"
    shutil.copytree(member_paths()[0], folder)
    spec = MemberSpec(path=str(folder), quantization_config=quantization)
    if form == "quantized checkpoint":
        made = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization
        )
        made.save_pretrained(folder)
        spec = MemberSpec(path=str(folder))
    load(spec).close()
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda weights: {n: w for n, w in weights.items() if name not in n})
    # transformers fails on quantized tensors that it cannot fill, before it reports them
    named = name.replace(".", r"\.") if form == "quantized while loading" else "'quantized'"
    with pytest.raises(LoadError, match=named):
        load(spec)


def sharded(
    folder: Path, file: object = SHARD, index: str = "model.safetensors.index.json"
) -> None:
    """Make the folder a sharded checkpoint whose index names `file`."""
    (folder / "model.safetensors").rename(folder / SHARD)
    write_index(folder, index, file)


@pytest.mark.quick
def test_an_index_that_names_pickled_weights_is_refused(copy: Path, unpickled: list[Any]) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    sharded(copy, "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"'pytorch_model\.bin'.*pickle.*allow_pickle=True"):
        load(copy)
    assert not unpickled


def test_pickled_weights_of_an_index_load_if_allowed(copy: Path) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    sharded(copy, "pytorch_model.bin")
    load(MemberSpec(path=str(copy), allow_pickle=True)).close()


@pytest.mark.parametrize(
    ("place", "index", "allow_pickle"),
    [
        *((place, "model", False) for place in ("absolute", "parent", "windows", "drive")),
        *(("link", index, True) for index in ("model", "pytorch_model")),
    ],
)
def test_an_index_that_leaves_the_folder_is_refused(
    copy: Path, place: str, index: str, allow_pickle: bool, unpickled: list[Any]
) -> None:
    outside = copy.parent / "other" / "model.safetensors"
    outside.parent.mkdir()
    shutil.copy(copy / "model.safetensors", outside)
    (copy / "linked.safetensors").symlink_to(outside)
    names = {
        "absolute": str(outside),
        "parent": "../other/model.safetensors",
        "windows": "..\\other\\model.safetensors",
        "drive": "c:other.safetensors",
        "link": "linked.safetensors",
    }
    suffix = "safetensors" if index == "model" else "bin"
    sharded(copy, names[place], f"{index}.{suffix}.index.json")
    with pytest.raises(LoadError, match="outside the model's folder"):
        load(MemberSpec(path=str(copy), allow_pickle=allow_pickle))
    assert not unpickled


@pytest.mark.parametrize(
    "content",
    ["{not json", '{"weight_map": {"a": 5}}', "[" * 100_000],
)
def test_an_index_that_is_not_an_index_is_refused(copy: Path, content: str) -> None:
    (copy / "model.safetensors").rename(copy / SHARD)
    (copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(LoadError, match=r"model\.safetensors\.index\.json"):
        load(copy)


# Adapters -------------------------------------------------------------------------------------


def test_a_config_that_names_pickled_weights_is_refused(copy: Path, unpickled: list[Any]) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "adapter_model.bin")
    change_config(copy, transformers_weights="adapter_model.bin")
    with pytest.raises(LoadError, match=r"config\.json.*'adapter_model\.bin'.*pickle"):
        load(copy)
    assert not unpickled


def test_an_index_that_config_names_is_checked(copy: Path, unpickled: list[Any]) -> None:
    write_index(copy, "mine.safetensors.index.json", "pytorch_model.bin")
    change_config(copy, transformers_weights="mine.safetensors.index.json")
    with pytest.raises(LoadError, match=r"'pytorch_model\.bin'.*pickle"):
        load(copy)
    assert not unpickled


def cached(copy: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Move a model to a cache of the hub, with files as links to blobs; return its hub id."""
    hub = copy.parent / "hub"
    model = hub / "models--someone--tiny"
    snapshot, commit = model / "snapshots" / ("0" * 40), model / "refs" / "main"
    snapshot.mkdir(parents=True)
    commit.parent.mkdir()
    commit.write_text("0" * 40)
    copy.rename(model / "blobs")
    for blob in (model / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    return "someone/tiny"


def test_models_of_the_hubs_cache_load(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(copy)
    name = cached(copy, monkeypatch)
    load(name).close()
    snapshot = next(Path(constants.HF_HUB_CACHE).glob("*/snapshots/*"))
    load(snapshot).close()


def test_an_adapter_is_not_ignored(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(checkpoint, "find_spec", lambda _name: None)
    with pytest.raises(LoadError, match=r"adapter.*peft.*merge_and_unload"):
        load(copy)


@pytest.mark.parametrize("index", [None, "pytorch_model.bin", "../other.safetensors"])
def test_a_pickled_adapter_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch, unpickled: list[Any], index: str | None
) -> None:
    (copy / "adapter_config.json").write_text("{}")
    if index is None:
        torch.save({}, copy / "adapter_model.bin")
    else:
        save_file({}, copy / "adapter_model.safetensors")
        write_index(copy, "adapter_model.safetensors.index.json", index)
    monkeypatch.setattr(checkpoint, "find_spec", lambda _name: object())
    with pytest.raises(LoadError, match="pickle" if index != "../other.safetensors" else "outside"):
        load(copy)
    assert not unpickled
