"""Loading of members: names, memory, and errors for invalid folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    InvalidInputError,
    LoadError,
    TransformersMember,
    UnsupportedModelError,
)
from tests.support.models import Recipe, model, tokenizer


def load(*members: str | Path | TransformersMember, **options: Any) -> AdaFuseEngine:
    return AdaFuseEngine.from_pretrained(
        [m if isinstance(m, TransformersMember) else str(m) for m in members], **options
    )


def test_a_folder_loads_and_decodes(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with load(saved) as engine:
        assert "member 'tiny-llama' is loaded in" in caplog.text
        assert engine.members == ("tiny-llama",)
        assert engine.context_window == 1024
        assert engine.generate("The ferry", max_new_tokens=4).text


@pytest.mark.quick
def test_a_member_can_override_the_dtype_of_the_call(saved: Path) -> None:
    specs = [
        TransformersMember(path=str(saved)),
        TransformersMember(path=str(saved), dtype="bfloat16"),
    ]
    with load(*specs, dtype="float32") as engine:
        assert [backend.model.dtype for backend in engine.backends] == [  # type: ignore[attr-defined]
            torch.float32,
            torch.bfloat16,
        ]
    with load(saved) as engine:
        assert engine.backends[0].model.dtype == torch.float64  # type: ignore[attr-defined]


@pytest.mark.quick
def test_weights_of_members_become_weights_of_the_ensemble(saved: Path) -> None:
    specs = [
        TransformersMember(path=str(saved), name="a", weight=2.0),
        TransformersMember(path=str(saved), name="b"),
    ]
    assert load(*specs).config.weights == {"a": 2.0, "b": 1.0}
    assert load(*specs, config=AdaFuseConfig(weights=(3, 4))).config.weights == (3.0, 4.0)
    assert load(saved).config.weights is None


@pytest.mark.quick
def test_members_placed_by_accelerate_decode(saved: Path) -> None:
    with load(
        saved, TransformersMember(path=str(saved), name="second"), device_map="auto"
    ) as engine:
        assert engine.generate("The ferry", max_new_tokens=3).text
    with load(TransformersMember(path=str(saved), device_map="cpu")) as engine:
        assert engine.generate("The ferry", max_new_tokens=3).text


# Errors of loading -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["models/one/two", "./one", "~/one", "one/"])
def test_a_missing_folder_is_not_asked_of_the_hub(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", raises(AssertionError("hub")))
    with pytest.raises(LoadError, match="the folder does not exist"):
        load(path)


@pytest.mark.parametrize("path", ["qwen3:8b", "hf.co/a/b:Q4_0"])
def test_a_name_of_ollama_gets_the_command_that_prints_its_file(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", raises(AssertionError("hub")))
    with pytest.raises(LoadError, match=f"ollama show --modelfile {path}$"):
        load(path)
    with pytest.raises(LoadError, match="the folder does not exist"):
        load(r"C:\models\one")


@pytest.mark.parametrize("file", ["model.safetensors"])
def test_a_file_of_a_model_folder_gets_the_folder(saved: Path, file: str) -> None:
    with pytest.raises(LoadError, match=f"Pass the folder: '{re.escape(str(saved))}'"):
        load(saved / file)


def test_the_name_of_an_embedded_member_gets_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", raises(AssertionError("hub")))
    with pytest.raises(LoadError, match=r"embedded member.*from_embedded\(\).*member_paths\(\)"):
        load("wren")


def test_a_folder_with_the_name_of_an_embedded_member_loads(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy.rename(copy.parent / "wren")
    monkeypatch.chdir(copy.parent)
    load("wren").close()


@pytest.mark.parametrize(
    ("offline", "says"),
    [
        (True, r"no such folder.*HF_HUB_OFFLINE is set.*unset HF_HUB_OFFLINE"),
        (False, r"no such folder.*cannot be reached.*set HF_HUB_OFFLINE=1"),
    ],
)
def test_the_error_without_the_hub_says_what_to_do(
    offline: bool, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:  # the hub's client itself would try to connect for half a minute
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        error = OSError()
        error.__cause__ = LocalEntryNotFoundError("no connection")
        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", raises(error))
    with pytest.raises(LoadError, match=says) as caught:
        load("gpt-4")
    assert str(caught.value).count("gpt-4") == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (RepositoryNotFoundError, "the Hugging Face hub has no such model.*hf auth login"),
        (GatedRepoError, "grant access.*https://huggingface.co/some/model,.*hf auth login"),
        (RevisionNotFoundError, "does not have this revision"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(
    kind: type[HfHubHTTPError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: Any = MagicMock()
    error = OSError("a long text")
    error.__cause__ = kind("another long text", response=answer)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", raises(error))
    with pytest.raises(LoadError, match=says):
        load("some/model")


def raises(error: Exception) -> Any:
    """Return a function that raises the error, whatever its arguments are."""

    def function(*_arguments: Any, **_options: Any) -> None:
        raise error

    return function


def test_an_invalid_configuration_is_explained_in_one_line(copy: Path) -> None:
    file = copy / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": "wide" * 1000}))
    with pytest.raises(LoadError, match=r"hidden_size.*int") as caught:
        load(copy)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def spoil(name: str, content: bytes | None) -> Callable[[Path], None]:
    """Return a function that replaces or removes files of a model's folder."""

    def change(folder: Path) -> None:
        for file in folder.glob(name):
            file.unlink() if content is None else file.write_bytes(content)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (spoil("config.json", None), r"config\.json"),
        (spoil("config.json", b"{not json"), "spoiled"),
        (spoil("*token*", None), "tokenizer"),
        (spoil("model.safetensors", None), "spoiled"),
        (spoil("model.safetensors", b"\x10" * 64), "spoiled"),
    ],
)
def test_a_folder_that_lacks_a_part_or_has_a_damaged_one(
    saved: Path, copy: Path, change: Callable[[Path], None], says: str
) -> None:
    change(copy)
    with pytest.raises(LoadError, match=says):
        load(saved, copy)


@pytest.mark.quick
@pytest.mark.parametrize("members", [[], [""], [5], "gpt2"])
def test_what_is_no_list_of_members(members: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"member|path|list"):
        AdaFuseEngine.from_pretrained(members)


def pickled(folder: Path) -> None:
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def test_pickled_weights_are_an_error_unless_allowed(copy: Path) -> None:
    pickled(copy)
    with pytest.raises(LoadError, match=r"pickle.*allow_pickle=True"):
        load(copy)
    with load(TransformersMember(path=str(copy), allow_pickle=True)) as engine:
        assert engine.generate("The ferry", max_new_tokens=3).text


def test_an_encoder_decoder_model(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=450,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "tiny-t5")
    tokenizer("bytelevel").save_pretrained(tmp_path / "tiny-t5")
    with pytest.raises(UnsupportedModelError, match=r"tiny-t5.*causal"):
        load(tmp_path / "tiny-t5")


def test_remote_code_without_the_flag(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["model_type"] = "homemade"
    config["auto_map"] = {
        "AutoConfig": "homemade.HomemadeConfig",
        "AutoModelForCausalLM": "homemade.Homemade",
    }
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "homemade.py").write_text("raise SystemExit('this code ran')\n")
    with pytest.raises(LoadError, match=r"trust_remote_code=True"):
        load(copy)


def test_a_loaded_model_and_its_tokenizer_are_not_changed() -> None:
    from adafuse_llm.backends.huggingface import HuggingFaceBackend

    recipe = Recipe("qwen2", seed=8)
    mine = model(recipe)
    before = mine.config.to_json_string(), mine.generation_config.to_json_string()
    weights = {name: value.clone() for name, value in mine.state_dict().items()}
    hooks = sum(len(module._forward_hooks) for module in mine.modules())
    with AdaFuseEngine([HuggingFaceBackend(mine, tokenizer("bytelevel"), "mine")]) as engine:
        engine.generate("The ferry", max_new_tokens=4)
    assert (mine.config.to_json_string(), mine.generation_config.to_json_string()) == before
    assert all(torch.equal(value, weights[name]) for name, value in mine.state_dict().items())
    assert sum(len(module._forward_hooks) for module in mine.modules()) == hooks
