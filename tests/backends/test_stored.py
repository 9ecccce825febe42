"""Chat templates and tokens that are known without loading a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from adafuse_llm.backends.huggingface.text import HuggingFaceText
from adafuse_llm.backends.stored import stored_byte_tokens, stored_chat_template
from adafuse_llm.embedded import member_paths
from adafuse_llm.text.codec import TokenizerCodec
from tests.support.gguf_files import embedded_gguf
from tests.support.models import CHATML, tokenizer

KINDS: tuple[Any, ...] = ("bytelevel", "sentencepiece", "unigram", "wordpiece")


def loaded(folder: Path | str) -> tuple[bool, bool]:
    """What the loaded tokenizer tells of its chat template and its tokens."""
    known = AutoTokenizer.from_pretrained(folder)
    return TokenizerCodec(known).has_chat_template, HuggingFaceText(known).follows_grammars


def stored(folder: Path | str) -> tuple[bool | None, bool | None]:
    return stored_chat_template(str(folder)), stored_byte_tokens(str(folder))


@pytest.mark.parametrize("template", [CHATML, None])
@pytest.mark.parametrize("kind", KINDS)
def test_l8_files_tell_what_the_loaded_tokenizer_tells(tmp_path, kind, template):
    tokenizer(kind, template).save_pretrained(tmp_path)
    assert stored(tmp_path) == loaded(tmp_path)
    assert stored(tmp_path)[0] == (template is not None)


@pytest.mark.parametrize("path", member_paths(), ids=lambda path: path.name)
def test_l8_files_of_the_embedded_members_tell(path):
    assert stored(path) == loaded(path) == (True, True)


@pytest.mark.parametrize("path", member_paths(), ids=lambda path: path.name)
def test_gguf_files_of_the_embedded_members_tell(path):
    assert stored(embedded_gguf(path.name)) == (True, True)


@pytest.mark.quick
def test_gguf_files_that_are_not_here_tell_nothing(tmp_path):
    assert stored(tmp_path / "missing.gguf") == (None, None)
    assert stored("org/some-GGUF") == (None, None)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("text", True),
        ("list", True),
        ("file", True),
        ("folder", True),
        ("empty", False),
        ("empty folder", False),
    ],
)
def test_l8_a_template_can_be_in_several_places(tmp_path, place, expected):
    tokenizer("bytelevel", None).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": "default", "template": CHATML}]
    config |= {"text": {"chat_template": CHATML}, "list": {"chat_template": named}}.get(place, {})
    config |= {"chat_template": ""} if place == "empty" else {}
    path.write_text(json.dumps(config))
    if "folder" in place:
        (tmp_path / "additional_chat_templates").mkdir()
    if place in ("file", "folder"):
        name = {"file": "chat_template", "folder": "additional_chat_templates/tool_use"}[place]
        (tmp_path / f"{name}.jinja").write_text(CHATML)
    assert stored_chat_template(str(tmp_path)) == loaded(tmp_path)[0] == expected


@pytest.mark.quick
@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"auto_map": {}}', '{"decoder": 3}'])
def test_l8_unusable_files_tell_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
        (tmp_path / "tokenizer.json").write_text(content)
    expected = False if content == '{"decoder": 3}' else None
    assert stored(tmp_path) == (expected, None)


@pytest.mark.quick
def test_l8_a_file_is_read_again_when_it_has_changed(tmp_path):
    path = tmp_path / "tokenizer.json"
    for kind, expected in (("ByteLevel", True), ("WordPiece", False)):
        path.write_text(json.dumps({"decoder": {"type": kind}}))
        os.utime(path, ns=(0, int(expected)))
        assert stored_byte_tokens(str(tmp_path)) == expected
    path.write_text('{"decoder": null}')
    assert stored_byte_tokens(str(tmp_path)) is False
    path.unlink()
    for name, answer in (("LlamaTokenizerFast", True), ("XLNetTokenizer", None)):
        (tmp_path / "tokenizer.model").touch()
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        assert stored_byte_tokens(str(tmp_path)) is answer


@pytest.mark.quick
def test_l8_the_local_cache_of_the_hub_does_not_tell_that_a_template_is_missing(
    tmp_path, monkeypatch
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    folder = repository / "snapshots" / "1a"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1a")
    (folder / "tokenizer_config.json").write_text("{}")
    assert stored_chat_template("some/model") is None
    (folder / "chat_template.jinja").write_text(CHATML)
    assert stored_chat_template("some/model") is True
    (folder / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}')
    assert stored_byte_tokens("some/model") is True
    assert stored_byte_tokens("some/other") is None
