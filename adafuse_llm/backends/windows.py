"""Context windows of models, read from their files without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from adafuse_llm.backends.stored import stored_facts, stored_path

ENTRIES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Configuration entries for the context window, in order of precedence."""


def window_in(read: Callable[[str], Any]) -> int | None:
    """Return the context window in a configuration, in tokens, prompt included.

    Args:
        read: returns the value of a configuration entry, or None if the entry is missing.

    Returns:
        The window, or None if the configuration has none.
    """
    values = (read(name) for name in ENTRIES)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def stored_window(source: str, revision: str | None = None, file: str | None = None) -> int | None:
    """Return the context window in a model's ``config.json`` or GGUF file, without loading it.

    Args:
        source: a GGUF file, a model folder or a hub id. Only the local cache of the hub is read.
        revision: revision of a hub model.
        file: GGUF file in the folder or hub repository.

    Returns:
        The window. None if the file is missing or has no window, which can mean that a default of
        transformers applies.
    """
    if (facts := stored_facts(source, revision, file)) is not None:
        return facts.context_window
    try:
        path = stored_path(source, "config.json", revision)
        config = json.loads(path.read_text(encoding="utf-8"))
        text_config = config.get("text_config", config)  # multimodal models have a nested one
        return window_in(text_config.get)
    except (OSError, ValueError, AttributeError):
        return None
