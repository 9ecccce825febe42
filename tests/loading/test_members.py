"""Loading of transformers members: what loads, and the errors of what does not."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    InvalidInputError,
    LoadError,
    TransformersMember,
)
from adafuse_llm.embedded import member_paths
from adafuse_llm.loading import huggingface
from tests.support.models import Recipe, model, tokenizer
from tests.support.waiting import background

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama of two layers and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    model(Recipe(seed=5)).save_pretrained(folder)
    tokenizer("bytelevel").save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "spoiled"))


def load(*members: str | Path | TransformersMember, **options: Any) -> AdaFuseEngine:
    return AdaFuseEngine.from_pretrained(
        [m if isinstance(m, TransformersMember) else str(m) for m in members], **options
    )


def test_a_folder_loads_and_decodes(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    placed = TransformersMember(str(saved), name="placed", device_map="cpu")
    with load(saved, placed, device_map="auto") as engine:
        assert "member 'tiny-llama' is loaded in" in caplog.text
        assert engine.members == ("tiny-llama", "placed")
        assert engine.context_window == 1024
        assert engine.generate("The ferry", max_new_tokens=4).text


@pytest.mark.quick
def test_settings_of_a_member_win_over_those_of_the_call(saved: Path) -> None:
    specs = [
        TransformersMember(str(saved), name="a", weight=2.0),
        TransformersMember(str(saved), name="b", dtype="bfloat16"),
    ]
    with load(*specs, dtype="float32") as engine:
        dtypes = [backend.model.dtype for backend in engine.backends]  # type: ignore[attr-defined]
        assert dtypes == [torch.float32, torch.bfloat16]
        assert engine.config.weights == {"a": 2.0, "b": 1.0}
    given = load(*specs, config=AdaFuseConfig(weights=(3, 4)))
    assert given.config.weights == (3.0, 4.0)
    with load(saved) as engine:
        assert engine.backends[0].model.dtype == torch.float64  # type: ignore[attr-defined]
        assert engine.config.weights is None


def test_engines_load_side_by_side() -> None:
    before, paths = torch.get_default_dtype(), member_paths()
    calls = [background(load, *paths, dtype=name) for name in ("bfloat16", "float32") * 2]
    engines = [call.result() for call in calls]
    assert torch.get_default_dtype() == before
    for engine in engines:
        engine.close()


# Paths and the hub ----------------------------------------------------------------------------


def raises(error: Exception) -> Any:
    """A function that raises the error, whatever its arguments are."""
    return Mock(side_effect=error)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        *((path, "the folder does not exist") for path in ("a/b/c", "~/one", "one/")),
        (r"C:\models\one", "the folder does not exist"),
        ("qwen3:8b", "ollama show --modelfile qwen3:8b$"),
        ("hf.co/a/b:Q4_0", "ollama show --modelfile hf.co/a/b:Q4_0$"),
        (str(member_paths()[0] / "model.safetensors"), r"Pass a folder"),
    ],
)
def test_what_is_no_hub_id_is_not_asked_of_the_hub(
    path: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", raises(AssertionError("hub")))
    with pytest.raises(LoadError, match=says):
        load(path)


@pytest.mark.quick
@pytest.mark.parametrize("members", [[], [""], [5], "gpt2"])
def test_what_is_no_list_of_members_is_refused(members: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"member|path|list"):
        AdaFuseEngine.from_pretrained(members)


def test_models_of_the_hubs_cache_load(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = copy.parent / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    copy.rename(repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(copy.parent / "hub"))
    load("someone/tiny").close()
    with pytest.raises(LoadError, match=r"no such folder.*HF_HUB_OFFLINE is set"):
        load("someone/else")


def test_servers_are_asked_before_weights_are_loaded(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = transformers.AutoModelForCausalLM
    monkeypatch.setattr(weights, "from_pretrained", raises(AssertionError("weights")))
    with pytest.raises(LoadError, match=r"127\.0\.0\.1"):
        load(saved, "http://127.0.0.1:9/v1/some")


# Folders --------------------------------------------------------------------------------------


def spoil(name: str, content: bytes | None, folder: Path) -> None:
    """Replace or remove files of a model's folder."""
    for file in folder.glob(name):
        file.unlink() if content is None else file.write_bytes(content)


def configure(values: dict[str, Any], folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def template(text: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(text)


def add_tokens(name: str, folder: Path) -> None:
    """Add a token more than the model has spare rows. Padding is special."""
    known = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [f"<{name}{number}>" for number in range(4)]
    known.add_tokens([transformers.AddedToken(text, special=name == "pad") for text in texts])
    known.save_pretrained(folder)


def rename(
    new_name: Callable[[str], str | None], more: dict[str, torch.Tensor], folder: Path
) -> None:
    """Rename tensors, remove those whose new name is None, and add more."""
    file = folder / "model.safetensors"
    found = load_file(file).items()
    renamed = {new: tensor for name, tensor in found if (new := new_name(name)) is not None}
    save_file({**renamed, **more}, file, {"format": "pt"})


def without(*names: str) -> Change:
    return partial(rename, lambda name: None if name in names else name, {})


def pickled(folder: Path) -> None:
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def evil(folder: Path, *, has_index: bool) -> None:
    """Pickled weights that would run code. An index of safetensors can name them, too."""

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(folder / "ran"), "w")

    torch.save({"lm_head.weight": Evil()}, folder / "pytorch_model.bin")
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if has_index:
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "pytorch_model.bin")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def homemade(folder: Path) -> None:
    """A model with code of its own."""
    auto = {"AutoConfig": "homemade.Config", "AutoModelForCausalLM": "homemade.Model"}
    configure({"model_type": "homemade", "auto_map": auto}, folder)
    (folder / "homemade.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


def encoder_decoder(folder: Path) -> None:
    sizes = {"vocab_size": 450, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    config = transformers.T5Config(**sizes, num_layers=1, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)


def only_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1a\nsize 9\n"
Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (partial(spoil, "config.json", b"{not json"), "config"),
        (partial(configure, {"hidden_size": "wide" * 1000}), "hidden_size.*int"),
        (partial(spoil, "*token*", None), "tokenizer"),
        (partial(template, "{% for m in messages %}{{ m.content }"), "template .*SyntaxError"),
        (partial(template, "{{ raise_exception('Only tools') }}"), "template .*Only tools"),
        (partial(add_tokens, "extra"), "tokens .* no row: <extra3>"),
        (partial(spoil, "model.safetensors", None), "cannot be loaded"),
        (partial(spoil, "model.safetensors", b"\x10" * 64), "cannot be loaded"),
        (without(Q, UP), rf"tensors are missing \(2, such as {Q}\)"),
        (partial(configure, {"num_hidden_layers": 3}), r"tensors are missing \(9, such as model\."),
        (partial(configure, {"intermediate_size": 40}), r"\[32, 48\] instead of \[32, 40\]"),
        (partial(configure, {"quantization_config": {"quant_method": "made-up"}}), "'made-up'"),
        (partial(configure, {"quantization_config": {"bits": 4}}), r"quant_method.*'bits'"),
        (partial(evil, has_index=False), "cannot be loaded"),
        (partial(evil, has_index=True), "cannot be loaded"),
        (partial(spoil, "model.safetensors", LFS), r"model\.safetensors is a pointer of Git LFS"),
        (partial(spoil, "tokenizer.json", LFS), r"tokenizer\.json is a pointer of Git LFS"),
        (only_adapter, "merge_and_unload"),
        (homemade, "trust_remote_code=True"),
        (encoder_decoder, "causal"),
    ],
)
def test_a_folder_that_cannot_be_loaded_has_one_error_and_runs_no_code(
    saved: Path, copy: Path, change: Change, says: str
) -> None:
    change(copy)
    with pytest.raises(LoadError, match=f"member 'spoiled'.*{says}") as caught:
        load(saved, copy)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 900
    assert not (copy / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        pickled,
        partial(add_tokens, "pad"),
        *(
            partial(rename, str, {name: torch.ones(4)})
            for name in (
                "model.layers.0.self_attn.rotary_emb.inv_freq",
                "vision_tower.layers.0.mlp.up_proj.weight",
            )
        ),
    ],
)
def test_old_and_larger_checkpoints_load(copy: Path, change: Change) -> None:
    change(copy)
    with load(copy) as engine:
        assert engine.generate("<pad3> The ferry", max_new_tokens=3).text


def test_names_without_the_prefix_of_the_base_model_load(tmp_path: Path) -> None:
    model(Recipe("gpt2")).save_pretrained(tmp_path)
    tokenizer("bytelevel").save_pretrained(tmp_path)
    rename(lambda name: name.removeprefix("transformer."), {}, tmp_path)
    load(tmp_path).close()


def test_an_adapter_is_not_ignored(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(huggingface, "find_spec", lambda _name: None)
    with pytest.raises(LoadError, match=r"adapter.*peft.*merge_and_unload"):
        load(copy)


@pytest.mark.parametrize("given", ["x" * 10_000, transformers.BitsAndBytesConfig])
def test_a_quantization_that_is_no_configuration_is_refused(saved: Path, given: Any) -> None:
    with pytest.raises(LoadError, match=r"BitsAndBytesConfig\(load_in_4bit=True\)") as caught:
        load(TransformersMember(str(saved), quantization_config=given))
    assert len(str(caught.value)) < 500


def test_a_quantized_member_with_missing_tensors_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True)
    shutil.copytree(member_paths()[0], tmp_path, dirs_exist_ok=True)
    without(UP)(tmp_path)
    # transformers fails on quantized tensors that it cannot fill, before it reports them
    with pytest.raises(LoadError, match=UP):
        load(TransformersMember(str(tmp_path), quantization_config=quantization))
