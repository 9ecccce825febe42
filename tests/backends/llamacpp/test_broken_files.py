"""Whatever a GGUF file holds, it is refused or loaded, and the application lives."""

import os
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, GGUFMember, LoadError
from adafuse_llm.backends.gguf import read_facts
from adafuse_llm.loading.gguf import load_gguf_vocabulary
from tests.backends.gguf_members import tokenizer
from tests.support.gguf_files import embedded_gguf, rewrite_gguf

pytestmark = [
    pytest.mark.gguf,
    pytest.mark.skipif(os.name == "nt", reason="Windows has neither signals nor these limits"),
]

TEMPLATE, EOS = "tokenizer.chat_template", "tokenizer.ggml.eos_token_id"


def wren() -> Path:
    return embedded_gguf("wren", "q8_0")


def load(path: Path) -> AdaFuseEngine:
    return AdaFuseEngine.from_pretrained([GGUFMember(str(path), name="m")])


def spellings() -> list[str]:
    known = tokenizer("wren")
    return list(known.convert_ids_to_tokens(range(len(known))))


def twice() -> list[str]:
    tokens = spellings()
    return [*tokens[:500], tokens[501], *tokens[501:]]


REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("tokenizer.ggml.tokens", twice, "signal SIGABRT .*id_to_token"),
    ("qwen3.block_count", 0, "signal SIGABRT .*n_layer"),
    ("qwen3.rope.freq_base", 0.0, "the model computes NaN"),
    ("tokenizer.ggml.token_type", [1], "rejects the file .*toktypes"),
    ("general.architecture", "nonsense", "unknown model architecture: 'nonsense'"),
    ("blk.0.attn_q.weight", None, "tensor 'blk.0.attn_q"),
)


@pytest.mark.parametrize(("key", "value", "says"), REFUSED)
def test_a_file_that_ends_or_blocks_a_process_is_refused(
    tmp_path: Path, key: str, value: Any, says: str
) -> None:
    entries = {key: value() if callable(value) else value} if value is not None else {}
    path = rewrite_gguf(wren(), tmp_path / "m.gguf", entries=entries, without=[TEMPLATE, key])
    with pytest.raises(LoadError, match=rf"^member 'm' \(.*\) cannot be loaded: .*{says}"):
        load(path)


def test_a_file_that_lacks_its_last_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(wren().read_bytes()[:-600])
    with pytest.raises(LoadError, match=r"^member 'm' .*incomplete\)\. Download it again"):
        load(path)


@pytest.mark.parametrize("window", [0, 4_000_000_000])
def test_a_window_that_cannot_be_right_is_that_of_the_cache(tmp_path, window) -> None:
    changed = {"qwen3.context_length": window}
    with load(rewrite_gguf(wren(), tmp_path / "m.gguf", entries=changed)) as engine:
        assert engine.context_window == 16_384
        assert engine.generate("The ferry", max_new_tokens=4).text


def test_an_end_token_that_a_header_lacks_is_told_and_not_guessed(tmp_path: Path, caplog) -> None:
    ends = (EOS, "tokenizer.ggml.eot_token_id")
    path = rewrite_gguf(wren(), tmp_path / "m.gguf", without=[*ends, TEMPLATE])
    with load(path) as engine:
        assert not engine.backends[0].end_ids
    assert "names no end token" in caplog.text


def test_a_header_without_the_rules_of_its_tokenizer_is_told(tmp_path: Path, caplog) -> None:
    entries = ("tokenizer.ggml.pre", "tokenizer.ggml.token_type")
    path = rewrite_gguf(wren(), tmp_path / "m.gguf", without=entries)
    load_gguf_vocabulary(GGUFMember(str(path)))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    for entry, message in zip(entries, told, strict=True):
        assert f"its header lacks {entry}, so llama.cpp" in message


def test_a_marker_of_the_template_that_llama_cpp_splits_is_told(tmp_path: Path, caplog) -> None:
    tokens, old, new = spellings(), "<|start|>", "<turn>"
    control = ("<|endoftext|>", "<|end|>", "<|pad|>")
    entries: dict[str, Any] = {
        "tokenizer.ggml.tokens": [new if token == old else token for token in tokens],
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
        TEMPLATE: str(read_facts(wren()).chat_template).replace(old, f"<b>{new}"),
    }
    for path in (wren(), rewrite_gguf(wren(), tmp_path / "m.gguf", entries=entries)):
        load_gguf_vocabulary(GGUFMember(str(path)))
        load(path).close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all("its header calls '<turn>' of its chat template" in each for each in told)
