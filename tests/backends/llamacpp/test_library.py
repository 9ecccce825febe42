"""The library llama.cpp is optional, and its messages go to Python's logging."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from adafuse_llm.backends.llamacpp.library import VocabularyModel, load_library, metadata
from adafuse_llm.errors import LoadError, MissingDependencyError
from tests.support.gguf_vocabularies import write_vocabulary
from tests.support.models import tokenizer


@pytest.mark.quick
def test_an_error_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    load_library.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"pip install 'adafuse-llm\[gguf\]'"):
        load_library()


@pytest.mark.gguf
def test_messages_are_logged_and_not_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, "adafuse_llm.backends.llamacpp.library")
    with pytest.raises(LoadError):
        VocabularyModel(tmp_path / "missing.gguf")
    assert "failed to open GGUF file" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert capfd.readouterr() == ("", "")


@pytest.mark.gguf
def test_metadata_of_any_length_is_read_as_text(tmp_path: Path) -> None:
    template = "{# " + "caf\u00e9 " * 1_000 + "#}x"
    path = write_vocabulary(tmp_path / "a.gguf", tokenizer("bytelevel"), template=template)
    file = VocabularyModel(path)
    items = metadata(file.model)
    file.close()
    assert items["tokenizer.chat_template"] == template
    assert items["tokenizer.ggml.model"] == "gpt2"
    assert items["tokenizer.ggml.add_bos_token"] == "false"
