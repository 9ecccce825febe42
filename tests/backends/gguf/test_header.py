"""Facts from the header of a GGUF file, and errors about unusable files."""

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from adafuse_llm import LoadError, UnsupportedModelError
from adafuse_llm.backends.gguf.header import read_facts
from adafuse_llm.embedded import member_paths
from tests.support.gguf_files import embedded_gguf
from tests.support.gguf_vocabularies import finish


def written(path: Path, arch: str = "llama", *, tensors: int = 1, **entries: Any) -> Path:
    """A small file with some entries; the keys have ``__`` for a dot."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in entries.items():
        adders: dict[type, Any] = {
            str: writer.add_string,
            int: writer.add_uint32,
            list: writer.add_array,
            bool: writer.add_bool,
        }
        adders[type(value)](key.replace("__", "."), value)
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.attn_q.weight", np.ones((4, 32), np.float32))
    return finish(writer, path)


@pytest.mark.parametrize("folder", member_paths()[:2], ids=lambda path: path.name)
def test_the_header_tells_what_the_model_folder_tells(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    facts = read_facts(embedded_gguf(folder.name))
    assert facts.architecture == config.model_type
    assert facts.context_window == config.max_position_embeddings
    assert facts.chat_template == tokenizer.chat_template
    assert facts.cache_bytes(3, "f32") == 3 * 4 * 2 * 5 * 192
    assert facts.cache_bytes(1, "q8_0") == 2 * 5 * 192 * 34 // 32
    assert facts.file_bytes == embedded_gguf(folder.name).stat().st_size


@pytest.mark.quick
def test_layers_can_have_different_numbers_of_heads(tmp_path: Path) -> None:
    facts = read_facts(
        written(
            tmp_path / "a.gguf",
            llama__block_count=3,
            llama__embedding_length=64,
            llama__attention__head_count=8,
            llama__attention__head_count_kv=[2, 0, 4],
        )
    )
    assert facts.cache_bytes(10, "f16") == 10 * 2 * 6 * (8 + 8)
    assert facts.tokenizer == "no_vocab"


def test_a_large_vocabulary_takes_less_than_two_seconds(tmp_path: Path) -> None:
    tokens = [f"token{number}" for number in range(150_000)]
    path = written(tmp_path / "a.gguf", tokenizer__ggml__tokens=tokens)
    start = time.process_time()
    assert read_facts(path).entries["tokenizer.ggml.tokens"] is None
    assert time.process_time() - start < 2  # 0.1 as a rule


@pytest.mark.quick
@pytest.mark.parametrize("length", [0, 3, 20, 100])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "a.gguf", tensors=2, general__name="x" * 100)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(LoadError, match=r"a\.gguf (is truncated|is not a usable)"):
        read_facts(path)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04 a zip file", r"not a usable GGUF file: it begins with b'PK"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"b'vers'.*'git lfs pull'"),
        (b"GGUF\x01\0\0\0" + bytes(16), "version 0x1"),
        (b"GGUF\0\0\0\x03" + bytes(16), "little-endian"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 40, "truncated"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\1" + bytes(15) + b"\x63" + bytes(9), "unknown type 99"),
    ],
)
def test_a_file_that_is_not_as_the_format_says_is_refused(tmp_path, content, says) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=rf"a\.gguf .*{says}") as caught:
        read_facts(path)
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(LoadError, match=r"a\.gguf cannot be read"):
        read_facts(path)


@pytest.mark.quick
def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", arch="bert", bert__attention__causal=False)
    with pytest.raises(UnsupportedModelError, match=r"a\.gguf .*causal"):
        read_facts(path)


@pytest.mark.quick
def test_a_model_in_parts_is_read_as_one(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        path = tmp_path / f"m-{number:05}-of-00003.gguf"
        written(path, tensors=number, split__count=3, split__no=number - 1)
    first, second, third = sorted(tmp_path.iterdir())
    facts = read_facts(first)
    assert facts.files == (first, second, third)
    assert facts.file_bytes == sum(file.stat().st_size for file in facts.files)
    with pytest.raises(LoadError, match=r"not the first of 3 parts .*-00001-of-00003\.gguf"):
        read_facts(second)
    second.unlink()
    with pytest.raises(LoadError, match=r"m-00002-of-00003\.gguf cannot be read"):
        read_facts(first)
    renamed = first.rename(tmp_path / "m.gguf")
    with pytest.raises(LoadError, match=r"not the first of 3 parts.*-00001-of-00003\.gguf"):
        read_facts(renamed)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([""], "t"),
        ([".tool_use"], "t.tool_use"),
        ([".a", ".b"], None),
        (["", ".tool_use"], {"default": "t", "tool_use": "t.tool_use"}),
        ([], None),
    ],
)
def test_the_only_template_of_a_file_is_its_template_whatever_its_name(
    tmp_path: Path, names: list[str], expected: object
) -> None:
    entries: dict[str, Any] = {f"tokenizer.chat_template{name}": f"t{name}" for name in names}
    assert read_facts(written(tmp_path / "a.gguf", **entries)).chat_template == expected
