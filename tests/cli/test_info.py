"""`adafuse info`: facts, and whether models can work together."""

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick


def test_a_table_and_a_verdict(adafuse, models):
    result = adafuse("info", *models)
    assert result.exit_code == 0, result.output
    for fact in ("LlamaForCausalLM", "GPT2LMHeadModel", "byte-level BPE", "8,192", "tree", "</s>"):
        assert fact in result.stdout
    assert "warning: badger: it has no chat template" in result.stdout
    assert result.stdout.endswith(
        "These models can work together; prompt and answer share a window of 8,192 tokens.\n"
    )


def test_json(adafuse, models):
    report = json.loads(adafuse("info", *models, "--json").stdout)
    assert report["can_work_together"] is True
    otter, badger = report["members"]
    assert otter["chat_template"] is True
    assert badger["chat_template"] is False
    assert otter["vocabulary"] == 300
    assert otter["context_window"] == 8192
    assert otter["cache"] == "tree"
    assert otter["dtype"] == "float32"
    assert otter["parameters"] * 4 <= otter["memory_bytes"]


def test_a_model_that_cannot_be_loaded(adafuse, models, tmp_path):
    result = adafuse("info", models[0], tmp_path)
    assert result.exit_code == 1
    assert "otter" in result.stdout
    assert "is not a model folder" in result.stdout
    assert result.stdout.endswith("These models cannot work together.\n")


@pytest.mark.parametrize(("alphabet", "code"), [("plain", 0), ("letters", 1)])
def test_a_tokenizer_that_loses_text(adafuse, models, tmp_path, alphabet, code):
    from tokenizers import Tokenizer, decoders
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "vole"
    shutil.copytree(models[0], folder)
    known = map(chr, range(32, 127)) if alphabet == "plain" else "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {c: i for i, c in enumerate(["<unk>", "\n", *known])}
    characters = Tokenizer(kinds.BPE(vocabulary, [], unk_token="<unk>"))
    characters.decoder = decoders.Fuse()
    for path in Path(folder).glob("*token*"):
        path.unlink()
    PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="<unk>").save_pretrained(folder)
    report = adafuse("info", folder, "--json")
    assert report.exit_code == code
    findings = [finding["text"] for finding in json.loads(report.stdout)["findings"]]
    assert any("loses emoji" in text for text in findings)
    assert any("loses plain text" in text for text in findings) == bool(code)


def test_s11_a_model_that_is_not_there_is_named_once(adafuse):
    result = adafuse("info", "gpt-4")
    assert result.exit_code == 1
    problem, verdict = result.stdout.splitlines()
    assert problem.startswith("problem: member 'gpt-4' cannot be loaded: ")
    assert problem.count("gpt-4") == 1
    assert "unset HF_HUB_OFFLINE" in problem
    assert verdict == "These models cannot work together."


def test_s11_the_name_of_an_embedded_member_gets_a_hint(adafuse):
    result = adafuse("info", "wren")
    assert result.exit_code == 1
    assert result.stdout.startswith("problem: member 'wren' is an embedded member")


def test_e2_a_checkpoint_with_missing_tensors_cannot_work(adafuse, models, tmp_path):
    folder = tmp_path / "otter"
    shutil.copytree(models[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    result = adafuse("info", folder)
    assert result.exit_code == 1
    assert "9 tensors (model.layers.1.input_layernorm.weight" in result.stdout
