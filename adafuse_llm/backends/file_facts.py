"""What the files of a model say before it is loaded: its context window, and chat templates.

Nothing here imports torch or transformers, or downloads a file. A result of None means that the
files on this machine do not tell. The arguments of all functions are:

    source     a GGUF file, a model folder or a hub id
    revision   revision of a hub model; only the local cache of the hub is read
    file       GGUF file in the folder or hub repository
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adafuse_llm.backends.gguf.files import is_gguf, stored_gguf
from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts

WINDOW_ENTRIES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Configuration entries for the context window, in order of precedence."""

TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
"""Files of a model that contain chat templates, besides ``tokenizer_config.json``."""


def window_in(read: Callable[[str], Any]) -> int | None:
    """Return the context window in a configuration, in tokens, prompt included; or None.

    Args:
        read: returns the value of a configuration entry, or None if the entry is missing.
    """
    values = (read(name) for name in WINDOW_ENTRIES)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def gguf_facts(
    source: str, revision: str | None = None, file: str | None = None
) -> GGUFFacts | None:
    """Return what the header of a GGUF member's file says; None for other members."""
    try:
        path = stored_gguf(source, file, revision)
        return None if path is None else read_facts(path)
    except OSError:  # LoadError, too
        return None


def file_window(source: str, revision: str | None = None, file: str | None = None) -> int | None:
    """Return the context window in a model's ``config.json`` or GGUF file.

    None can also mean that a default of transformers applies.
    """
    if (facts := gguf_facts(source, revision, file)) is not None:
        return facts.context_window
    try:
        config = json.loads(_path(source, "config.json", revision).read_text(encoding="utf-8"))
        return window_in(config.get("text_config", config).get)  # of a multimodal model
    except (OSError, ValueError, AttributeError):
        return None


def file_has_template(
    source: str, revision: str | None = None, file: str | None = None
) -> bool | None:
    """Return whether a model has a chat template."""
    if is_gguf(source, file, revision):
        facts = gguf_facts(source, revision, file)
        return None if facts is None else facts.chat_template is not None
    try:
        path = _path(source, "tokenizer_config.json", revision)
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("chat_template"):
            return True
        if any(any(path.parent.glob(pattern)) for pattern in TEMPLATE_FILES):
            return True
        is_complete = Path(source).is_dir() and "auto_map" not in config
        return False if is_complete else None  # the hub or the model's own code may have one
    except (OSError, ValueError, AttributeError):
        return None


def _path(source: str, name: str, revision: str | None) -> Path:
    """Return the path of a file of a model.

    Raises:
        OSError: the file of a hub model is not in the local cache.
        ValueError: `source` is neither an existing folder nor a valid hub id.
    """
    if (folder := Path(source)).is_dir():
        return folder / name
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source, name, revision=revision)
    if not isinstance(path, str):
        raise FileNotFoundError(f"{source} has no {name} in the local cache of the hub")
    return Path(path)
