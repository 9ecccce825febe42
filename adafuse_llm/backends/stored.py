"""Properties of models, read from their files without loading the models.

Nothing here imports torch or transformers, or downloads a file. A result of None means that the
files on this machine do not tell.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adafuse_llm.backends.gguf.files import is_gguf, stored_gguf
from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts

TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
"""Files of a model that contain chat templates, besides ``tokenizer_config.json``."""

SENTENCEPIECE_CLASSES = ("LlamaTokenizer", "GemmaTokenizer")
"""Tokenizers that transformers creates from a SentencePiece model, with bytes that are known."""

GGUF_BYTE_TOKENIZERS = ("gpt2", "llama", "t5")
"""Kinds of tokenizers in GGUF files whose tokens have known bytes."""

BYTE_DECODERS = frozenset({"ByteLevel", "ByteFallback", "Metaspace"})
"""Decoders of tokenizers whose tokens have known bytes."""


def stored_facts(
    source: str, revision: str | None = None, file: str | None = None
) -> GGUFFacts | None:
    """Return what the header of a GGUF member's file says; None for other members.

    Args:
        source: a GGUF file, a model folder or a hub id. Only the local cache of the hub is read.
        revision: revision of a hub model.
        file: GGUF file in the folder or hub repository.
    """
    try:
        path = stored_gguf(source, file, revision)
        if path is None:
            return None
        status = path.stat()
        return _facts(path, (status.st_mtime_ns, status.st_size))
    except OSError:  # LoadError, too
        return None


@functools.lru_cache(64)
def _facts(path: Path, _version: tuple[int, int]) -> GGUFFacts:
    """Read the header of a file. The result is kept for this version of the file."""
    return read_facts(path)


def stored_chat_template(
    source: str, revision: str | None = None, file: str | None = None
) -> bool | None:
    """Return whether a model's tokenizer has a chat template.

    Args:
        source: a GGUF file, a model folder or a hub id. Only the local cache of the hub is read.
        revision: revision of a hub model.
        file: GGUF file in the folder or hub repository.
    """
    if is_gguf(source, file, revision):
        facts = stored_facts(source, revision, file)
        return None if facts is None else facts.chat_template is not None
    try:
        path = stored_path(source, "tokenizer_config.json", revision)
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("chat_template"):
            return True
        if any(any(path.parent.glob(pattern)) for pattern in TEMPLATE_FILES):
            return True
        is_complete = Path(source).expanduser().is_dir() and "auto_map" not in config
        return False if is_complete else None  # the hub or the model's own code may have one
    except (OSError, ValueError, AttributeError):
        return None


def stored_byte_tokens(
    source: str, revision: str | None = None, file: str | None = None
) -> bool | None:
    """Return whether the bytes of a model's tokens are known, so that they can follow grammars.

    Args:
        source: a GGUF file, a model folder or a hub id. Only the local cache of the hub is read.
        revision: revision of a hub model.
        file: GGUF file in the folder or hub repository.
    """
    if is_gguf(source, file, revision):
        facts = stored_facts(source, revision, file)
        return None if facts is None else facts.tokenizer in GGUF_BYTE_TOKENIZERS or None
    try:
        path = stored_path(source, "tokenizer.json", revision).resolve()
        status = path.stat()
        return _has_byte_tokens(path, (status.st_mtime_ns, status.st_size))
    except FileNotFoundError:
        return _has_sentencepiece(source, revision) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield a decoder of the library ``tokenizers`` and all decoders in it, as dicts."""
    pending = [] if decoder is None else [decoder]
    while pending:
        each = pending.pop()
        yield each
        pending += each.get("decoders", ())


def has_byte_tokens(decoder: Mapping[str, Any] | None) -> bool:
    """Return whether the bytes of a tokenizer's tokens are known, by its decoder."""
    return not BYTE_DECODERS.isdisjoint(each["type"] for each in decoders(decoder))


def stored_path(source: str, name: str, revision: str | None = None) -> Path:
    """Return the path of a file of a model.

    Args:
        source: a model folder, or a hub id. Only the local cache of the hub is read.
        name: name of the file.
        revision: revision of a hub model.

    Raises:
        OSError: the file of a hub model is not in the local cache.
        ValueError: `source` is neither an existing folder nor a valid hub id.
    """
    if (folder := Path(source).expanduser()).is_dir():
        return folder / name
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source, name, revision=revision)
    if not isinstance(path, str):
        raise FileNotFoundError(f"{source} has no {name} in the local cache of the hub")
    return Path(path)


@functools.lru_cache(64)
def _has_byte_tokens(path: Path, _version: tuple[int, int]) -> bool:
    """Read a tokenizer's file. The result is kept for this version of the file."""
    return has_byte_tokens(json.loads(path.read_text(encoding="utf-8"))["decoder"])


def _has_sentencepiece(source: str, revision: str | None) -> bool:
    """Return whether a model has a SentencePiece tokenizer of a known class."""
    try:
        config = stored_path(source, "tokenizer_config.json", revision)
        name = json.loads(config.read_text(encoding="utf-8"))["tokenizer_class"]
        is_known = name.removesuffix("Fast") in SENTENCEPIECE_CLASSES
        return is_known and stored_path(source, "tokenizer.model", revision).is_file()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
