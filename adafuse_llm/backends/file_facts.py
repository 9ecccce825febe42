"""Find the context window of a model, and whether it has a chat template, without loading it.

Nothing here imports torch or transformers, or downloads a file. A result of None means that no
file on this machine has the answer. `source` is a GGUF file, a model folder or a hub id, `revision`
belongs to a hub id, and `file` is a GGUF file in the folder or hub repository.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adafuse_llm.backends.gguf.files import choose, gguf_names, is_gguf, stored_folder
from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts

WINDOW_ENTRIES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Configuration entries for the context window, in order of precedence."""

ORIGINAL = "original_max_position_embeddings"
"""Configuration entry for the context window that a model had before it was extended."""

TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
"""Files of a model that contain chat templates, besides ``tokenizer_config.json``."""


def context_window(config: Mapping[str, Any]) -> int | None:
    """Return the context window, in tokens, that a text model's configuration sets, or None.

    The window of "longrope" positions (Phi-3) ends at ``original_max_position_embeddings``, because
    a longer sequence has other rotary frequencies for all tokens.
    """
    # layers of different types may have different position settings (Gemma 3)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    layers = [layer for layer in rope.values() if isinstance(layer, Mapping)] or [rope]
    edges = [
        layer.get(ORIGINAL) or config.get(ORIGINAL)
        for layer in layers
        if layer.get("rope_type", layer.get("type")) == "longrope"
    ]
    windows: list[Any] = [next(filter(_is_size, map(config.get, WINDOW_ENTRIES)), None), *edges]
    return min(filter(_is_size, windows), default=None)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _gguf_facts(
    source: str, revision: str | None = None, file: str | None = None
) -> GGUFFacts | None:
    path = folder = stored_folder(source, revision)
    try:
        if folder is not None:
            path = folder / choose(gguf_names(folder), file)
        return read_facts(path or Path(source).expanduser())
    except OSError:  # LoadError, too
        return None


def file_window(source: str, revision: str | None = None, file: str | None = None) -> int | None:
    """Return the context window in a model's ``config.json`` or GGUF file, in tokens.

    If the file sets none, the result is None, although transformers may use a default.
    """
    if is_gguf(source, file, revision):
        facts = _gguf_facts(source, revision, file)
        return None if facts is None else facts.context_window
    config = _entries(source, revision, "config.json") or {}
    text = config.get("text_config")  # of a multimodal model
    return context_window(text if isinstance(text, dict) else config)


def file_has_template(
    source: str, revision: str | None = None, file: str | None = None
) -> bool | None:
    """Return whether a model has a chat template; None if files on this machine do not show it."""
    if is_gguf(source, file, revision):
        facts = _gguf_facts(source, revision, file)
        return None if facts is None else facts.chat_template is not None
    config = _entries(source, revision, "tokenizer_config.json")
    folder = stored_folder(source, revision)
    if folder is None or config is None:
        return None
    if config.get("chat_template") or any(any(folder.glob(pattern)) for pattern in TEMPLATE_FILES):
        return True
    # if no file here has a template, the hub or the model's own code may have one
    return False if Path(source).is_dir() and "auto_map" not in config else None


def _entries(source: str, revision: str | None, name: str) -> dict[str, Any] | None:
    folder = stored_folder(source, revision)
    try:
        entries = folder and json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return entries if isinstance(entries, dict) else None
