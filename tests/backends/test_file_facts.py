"""Windows and chat templates that are known without loading a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from adafuse_llm.backends.file_facts import WINDOW_ENTRIES, file_has_template, file_window
from adafuse_llm.text.codec import TokenizerCodec
from tests.support.gguf_files import embedded_gguf
from tests.support.models import CHATML, tokenizer


def test_the_header_of_a_gguf_file_tells(tmp_path: Path) -> None:
    file = embedded_gguf("wren", "q8_0")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).symlink_to(file)
    assert (file_window(str(file)), file_has_template(str(file))) == (4096, True)
    assert file_window(str(tmp_path), None, "b*") == 4096
    assert file_window(str(tmp_path)) is None, "two files fit"
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    for missing in (str(tmp_path / "b.gguf"), str(tmp_path / "c.gguf"), "org/some-GGUF"):
        assert file_window(missing) is file_has_template(missing) is None


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("text", True),
        ("list", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("empty", False),
    ],
)
def test_a_template_can_be_in_several_places(tmp_path: Path, place: str, expected: bool) -> None:
    tokenizer("bytelevel", None).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": CHATML}]
    given = {"text": CHATML, "list": named, "empty": ""}.get(place)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": given}))
    if place.endswith(".jinja"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(CHATML)
    loaded = TokenizerCodec(AutoTokenizer.from_pretrained(tmp_path)).has_chat_template
    assert file_has_template(str(tmp_path)) == loaded == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("config", "window"),
    [
        *(({name: 512}, 512) for name in WINDOW_ENTRIES),
        ({"seq_length": 8, "max_position_embeddings": 16}, 16),
        ({"text_config": {"n_positions": 64}, "max_position_embeddings": 9}, 64),
        ({"hidden_size": 8, "rope_scaling": [1]}, None),
    ],
)
def test_the_window_is_the_first_entry_that_has_one(
    tmp_path: Path, config: dict[str, Any], window: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert file_window(str(tmp_path)) == window


@pytest.mark.quick
@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"auto_map": {}, "text_config": 3}'])
def test_files_that_cannot_be_used_tell_nothing(tmp_path: Path, content: str | None) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        if content is not None:
            (tmp_path / name).write_text(content)
    assert file_window(str(tmp_path)) is file_has_template(str(tmp_path)) is None


@pytest.mark.quick
def test_the_local_cache_of_the_hub_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    for commit, window in (("1a" * 20, 100), ("2b" * 20, 200)):
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"n_positions": window}))
        (folder / "tokenizer_config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("2b" * 20)
    assert file_window("some/model") == 200
    assert file_window("some/model", "1a" * 20) == 100
    assert file_window("some/model", "other") is file_window("some/other") is None
    assert file_has_template("some/model") is None, "the hub may have a file with a template"
