"""Context windows that are read without loading a model."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from adafuse_llm.backends.huggingface.checkpoint import context_window
from adafuse_llm.backends.windows import ENTRIES, stored_window
from tests.support.gguf_files import embedded_gguf


def text_config(config: dict[str, Any]) -> Any:
    return SimpleNamespace(**config.get("text_config", config))


@pytest.mark.parametrize(
    ("config", "window"),
    [
        *(({name: 512}, 512) for name in ENTRIES),
        ({"seq_length": 8, "max_position_embeddings": 16}, 16),
        ({"max_position_embeddings": -1, "n_positions": 32}, 32),
        ({"text_config": {"n_positions": 64}, "max_position_embeddings": 9}, 64),
        ({"text_config": {}, "max_position_embeddings": 9}, None),
        ({"hidden_size": 8}, None),
    ],
)
def test_c11_a_stored_window_is_the_window_of_the_loaded_model(tmp_path, config, window):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_window(str(tmp_path)) == window
    assert context_window(text_config(config)) == window


@pytest.mark.parametrize("content", ["", "[]", "{", '{"text_config": 3}', '{"n_positions": "12"}'])
def test_c11_an_unusable_file_has_no_window(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert stored_window(str(tmp_path)) is None
    assert stored_window(str(tmp_path / "absent")) is None


def test_the_window_of_a_gguf_member_is_in_its_file(tmp_path):
    file = embedded_gguf("wren", "q8_0")
    (tmp_path / "a.gguf").symlink_to(file)
    for window in (stored_window(str(file)), stored_window(str(tmp_path))):
        assert window == 4096
    (tmp_path / "b.gguf").symlink_to(file)
    assert stored_window(str(tmp_path)) is None
    assert stored_window(str(tmp_path), None, "b*") == 4096
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert stored_window(str(tmp_path), None, "b.gguf") is None


def test_c11_the_local_cache_of_the_hub_is_read(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    for commit, window in (("1a", 100), ("2b", 200)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text(
            json.dumps({"n_positions": window})
        )
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("2b")
    assert stored_window("some/model") == 200
    assert stored_window("some/model", "1a") == 100
    assert stored_window("some/model", "other") is None
    assert stored_window("some/other") is None
