"""`adafuse info`: facts, and whether models can work together."""

import json
import shutil

import pytest

pytestmark = pytest.mark.quick


def test_a_table_and_a_verdict(adafuse, models):
    result = adafuse("info", *models)
    assert result.exit_code == 0, result.output
    for fact in ("LlamaForCausalLM", "GPT2LMHeadModel", "BPE", "8,192", "tree"):
        assert fact in result.stdout
    assert "warning: badger: it has no chat template" in result.stdout
    assert "warning: otter+badger: only some members have a chat template: 'otter'" in result.stdout
    assert result.stdout.endswith(
        "These models can work together; prompt and answer share a window of 8,192 tokens.\n"
    )


def test_a_configuration_file_names_the_models_and_a_checkpoint_its_settings(
    adafuse, models, tmp_path
):
    shutil.copytree(models[0], tmp_path / "otter")
    path = tmp_path / "otter" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.1}))
    file = tmp_path / "adafuse.yaml"
    file.write_text(json.dumps({"models": [str(path.parent), models[1]], "use": ["otter"]}))
    report = json.loads(adafuse("info", "--config", file, "--json").stdout)
    facts, other = report["members"]
    assert report["is_chat_model"] is True
    assert other["member"] == "badger"
    assert facts["conversation_begins"] == ["<", "s", "y", "s", "te"]
    assert facts["followed_settings"] == ["repetition_penalty=1.1"]


def test_a_model_that_cannot_be_loaded(adafuse, models, tmp_path):
    result = adafuse("info", models[0], tmp_path)
    assert result.exit_code == 1
    assert "otter" in result.stdout
    assert "is not a model folder" in result.stdout
    assert result.stdout.endswith("These models cannot work together.\n")


def test_a_tokenizer_that_loses_text(adafuse, models, tmp_path):
    from tests.support.models import tokenizer

    folder = shutil.copytree(models[0], tmp_path / "vole")
    for path in folder.glob("*token*"):
        path.unlink()
    tokenizer("unknowns").save_pretrained(folder)
    report = adafuse("info", folder, "--json")
    assert report.exit_code == 1
    (finding,) = json.loads(report.stdout)["findings"]
    assert (finding["level"], "its tokenizer loses plain text" in finding["text"]) == (
        "problem",
        True,
    )


def test_a_server_is_described(adafuse, tmp_path):
    from tests.support.inference_servers import RECIPE, InferenceServer
    from tests.support.models import tokenizer
    from tests.support.serving import served

    tokenizer(RECIPE.kind).save_pretrained(tmp_path)
    with served(InferenceServer("vllm").app()) as url:
        address = f"vllm+{url}/tiny?tokenizer={tmp_path}"
        (facts,) = json.loads(adafuse("info", address, "--json").stdout)["members"]
        assert (facts["member"], facts["format"], facts["model"]) == ("tiny", "vLLM 0.32.0", "tiny")
        assert (facts["context_window"], facts["listed_tokens"]) == (1023, 20)
        assert "This model can be used" in adafuse("info", address).stdout
    failed = adafuse("info", address)
    assert (failed.exit_code, "does not answer" in failed.stdout) == (1, True)
