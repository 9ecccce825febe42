"""Read facts about a model from the header of its GGUF file, without llama.cpp.

``docs/gguf.md`` of https://github.com/ggml-org/ggml describes the format. For a vocabulary of
262,000 tokens, the package ``gguf`` takes 37 s. This module skips long arrays, and takes 0.07 s.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from adafuse_llm.errors import LoadError, UnsupportedModelError, short_repr

MAGIC: Final = b"GGUF"
MAX_VALUES: Final = 512
"""Arrays of more numbers than this are skipped. Those with one number per layer are shorter."""

SCALARS: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""By GGUF's number of a scalar type: the format character in Python's ``struct``."""

UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10

TEMPLATE: Final = "tokenizer.chat_template"

NEEDED: Final = {
    "tokenizer.ggml.pre": "llama.cpp splits texts into tokens in other ways than the model knows",
    "tokenizer.ggml.token_type": "llama.cpp reads control tokens as plain text",
}
"""Entries that a vocabulary of byte-level BPE needs, and what happens without them."""

PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""Matches the end of a file's name if the file is a part of a split model."""


@dataclass(frozen=True)
class GGUFFacts:
    """Facts about a model from the header of its GGUF file.

    Attributes:
        files: the files of the model, in order.
        architecture: llama.cpp's name of the architecture, such as ``"qwen3"``.
        context_window: number of tokens that the model was trained for; None if it is not known.
        tokenizer: kind of the tokenizer, such as ``"gpt2"`` (byte-level BPE) or ``"llama"``
            (SentencePiece); ``"no_vocab"`` if the file has none.
        warnings: defects of the file that make the model's answers worse.
        chat_template: the chat template as Jinja text, or several templates by name, one of them
            ``"default"``. None without a template, or with several but no default.
        cache_elements: how many numbers the keys and values of one token have, in all layers.
        file_bytes: size of all files in bytes.
        entries: the first header's entries. Long arrays, and arrays of texts, are None.
    """

    files: tuple[Path, ...]
    architecture: str
    context_window: int | None
    tokenizer: str
    warnings: tuple[str, ...]
    chat_template: str | dict[str, str] | None
    cache_elements: int
    file_bytes: int
    entries: Mapping[str, Any]

    def cache_bytes(self, tokens: int, cache_type: str = "f16") -> int:
        """Return the maximum size, in bytes, of the keys and values of `tokens` tokens."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[cache_type.upper()]]
        return math.ceil(tokens * self.cache_elements * size / numbers)


def read_facts(path: str | Path) -> GGUFFacts:
    """Read facts from the header of a GGUF file. For a split model, `path` is the first part.

    Raises:
        LoadError: a file is missing, `path` is another part, or its header is unusable.
        UnsupportedModelError: the model is not a causal language model.
    """
    # read the first header, and find the other parts
    path = Path(path)
    entries = _read_entries(path)
    files = _part_paths(path, _entry(entries, "split.count", int) or 1)
    try:
        file_bytes = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise LoadError(f"{error.filename} cannot be read: {error.strerror}") from error
    # refuse a model that is not causal
    architecture = _entry(entries, "general.architecture", str) or "unknown"
    if entries.get(f"{architecture}.attention.causal") is False:  # llama.cpp would load it
        raise UnsupportedModelError(
            f"{path} has the architecture {architecture!r}, which is not causal; members must be "
            "causal (decoder-only) language models"
        )
    # read the context window and facts about the tokenizer
    window = _entry(entries, f"{architecture}.context_length", int) or 0
    tokenizer = _entry(entries, "tokenizer.ggml.model", str) or "no_vocab"
    lacking = NEEDED.keys() - entries.keys() if tokenizer == "gpt2" else ()
    return GGUFFacts(
        files=files,
        architecture=architecture,
        context_window=window if 0 < window < 2**31 else None,
        tokenizer=tokenizer,
        warnings=tuple(
            f"its header lacks {key}, so {NEEDED[key]}, and answers get worse. Download a newer "
            "conversion of the model, or convert it again"
            for key in sorted(lacking)
        ),
        chat_template=_chat_templates(entries),
        cache_elements=_cache_elements(entries, architecture),
        file_bytes=file_bytes,
        entries=entries,
    )


def _chat_templates(entries: Mapping[str, Any]) -> str | dict[str, str] | None:
    # find templates with a name, such as "tool_use", and the one without
    named = {
        key.removeprefix(f"{TEMPLATE}."): text
        for key, text in entries.items()
        if key.startswith(f"{TEMPLATE}.") and isinstance(text, str)
    }
    if (default := entries.get(TEMPLATE)) and isinstance(default, str):
        return {**named, "default": default} if named else default
    return next(iter(named.values())) if len(named) == 1 else None


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a model, from the name of one part."""
    part = PART.search(name)
    if part is None:
        return [name]
    base, count = name[: part.start()], int(part[2])
    return [f"{base}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _part_paths(path: Path, count: int) -> tuple[Path, ...]:
    if count <= 1:
        return (path,)
    # llama.cpp finds the other parts by the name of the first
    names = part_names(path.name)
    if len(names) != count or path.name != names[0]:
        raise LoadError(
            f"{path} is not the first of {count} parts of a model. Pass the file whose name ends "
            f"with -00001-of-{count:05}.gguf, and give all parts their original names."
        )
    return tuple(map(path.with_name, names))


def _cache_elements(entries: Mapping[str, Any], architecture: str) -> int:
    # multiply the number of key/value heads in all layers by the size of a key plus a value
    attention = f"{architecture}.attention"
    layers = _entry(entries, f"{architecture}.block_count", int) or 0
    heads, pairs = (
        _entry(entries, f"{attention}.{key}", int | tuple)
        for key in ("head_count", "head_count_kv")
    )
    pairs = heads if pairs is None else pairs
    total = sum(pairs) if isinstance(pairs, tuple) else layers * (pairs or 0)
    most = max(heads, default=0) if isinstance(heads, tuple) else heads
    size = (_entry(entries, f"{architecture}.embedding_length", int) or 0) // (most or 1)
    sizes = (_entry(entries, f"{attention}.{key}_length", int) for key in ("key", "value"))
    return int(total * sum(size if known is None else known for known in sizes))


def _entry(entries: Mapping[str, Any], key: str, kind: Any) -> Any:
    # an entry of another type counts as missing
    value = entries.get(key)
    return value if isinstance(value, kind) else None


class _Reader:
    """Reads one value after another. Raises a `struct.error` if the file ends within a value."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position

    def scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        if kind not in SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        form = f"<{count}{SCALARS[kind]}"
        values = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return values

    def number(self, kind: int = UINT64) -> int:
        return int(self.scalars(kind, 1)[0])

    def string(self) -> str:
        # if the file ends within the text, the slice is too short, but raises no error
        length = self.number()
        text = self.data[self.position : self.position + length]
        if len(text) < length:
            raise struct.error("the file ends in a text")
        self.position += length
        return text.decode("utf-8", errors="replace")

    def value(self) -> Any:
        kind = self.number(UINT32)
        if kind == STRING:
            return self.string()
        return self.array() if kind == ARRAY else self.scalars(kind, 1)[0]

    def array(self) -> tuple[Any, ...] | None:
        # skip arrays of texts, and long arrays of numbers
        kind, count = self.number(UINT32), self.number()
        if kind == STRING:
            unpack, data, position = struct.Struct("<Q").unpack_from, self.data, self.position
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
            self.position = position
        elif kind in SCALARS and count > MAX_VALUES:
            self.position += count * struct.calcsize(SCALARS[kind])
        else:
            return self.scalars(kind, count)
        return None


def _read_entries(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data)
    except ValueError as error:
        raise LoadError(
            f"{path} is not a usable GGUF file: {error}. Download it again, or pass another file."
        ) from None
    except (struct.error, OverflowError):
        raise LoadError(
            f"{path} is truncated, or it is not a GGUF file. Download the file again."
        ) from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error


def _parse(data: mmap.mmap) -> dict[str, Any]:
    if data[:4] != MAGIC:
        raise ValueError(
            f"it begins with {short_repr(bytes(data[:4]))} instead of {MAGIC!r} ('git lfs pull' "
            "replaces pointers in a clone)"
        )
    reader = _Reader(data, 4)
    if (version := reader.number(UINT32)) not in (2, 3):
        raise ValueError(
            f"it has version {version:#x} of the format; llama.cpp reads versions 2 and 3, with "
            "little-endian numbers"
        )
    reader.number()  # how many tensors there are
    return {reader.string(): reader.value() for _ in range(reader.number())}
