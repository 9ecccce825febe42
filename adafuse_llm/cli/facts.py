"""Facts about members of all kinds, for `adafuse info`."""

from __future__ import annotations

import json
from typing import Any

from adafuse_llm.adjustment import changes_of
from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts, read_tokens
from adafuse_llm.errors import short_repr

GGUF_TOKENIZERS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece with bytes",
    "t5": "Unigram",
    "bert": "WordPiece",
    "no_vocab": "none",
}
"""What the kinds of tokenizers in GGUF files are."""


def describe(path: str, backend: Backend) -> dict[str, Any]:
    """Return facts about a member.

    Args:
        path: what the member was loaded from.
        backend: the member.
    """
    from adafuse_llm.backends.huggingface import HuggingFaceBackend
    from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend

    facts = {
        "member": backend.name,
        "path": path,
        "chat_template": backend.codec.has_chat_template,
        "context_window": backend.context_window,
    }
    if isinstance(backend, HuggingFaceBackend):
        return facts | _huggingface(backend)
    if isinstance(backend, LlamaCppBackend):
        found = read_facts(backend.path)
        return facts | _gguf(found) | {"end_tokens": _spelled(found, backend.end_ids)}
    if not backend.full:
        facts |= {"listed_tokens": backend.listed_limit, "word_ends": backend.has_word_ends()}
        facts |= _server(backend)
    return facts | {"end_tokens": [str(token) for token in sorted(backend.end_ids)]}


def describe_header(path: str, name: str, facts: GGUFFacts) -> dict[str, Any]:
    """Return what the header of a GGUF file says about a member that is not loaded.

    Args:
        path: what the member would be loaded from.
        name: the member's name.
        facts: what the header says.
    """
    return {
        "member": name,
        "path": path,
        "chat_template": facts.chat_template is not None,
        "context_window": facts.context_window,
        "end_tokens": _spelled(facts, facts.end_ids),
        **_gguf(facts),
    }


def _server(backend: Any) -> dict[str, Any]:
    """Return what a server says about itself and its model; nothing for other members."""
    told = getattr(backend, "facts", None)
    if told is None:
        return {}
    loaded = {} if told.source is None else {"files": told.source}
    return {"format": told.version, "model": told.model, **loaded}


def _huggingface(backend: Any) -> dict[str, Any]:
    model, tokenizer = backend.model, backend.tokenizer
    own = backend.own_adjustment
    settings = {
        "followed_settings": changes_of(own),
        "ignored_settings": backend.ignored_settings,
    }
    return {
        "format": "transformers",
        "architecture": type(model).__name__,
        "tokenizer": type(tokenizer).__name__,
        "tokenizer_kind": _tokenizer_kind(tokenizer),
        "vocabulary": len(tokenizer),
        "end_tokens": [tokenizer.convert_ids_to_tokens(i) for i in sorted(backend.end_ids)],
        "cache": backend.form,
        "parameters": backend.parameters,
        "memory_bytes": model.get_memory_footprint(),
        "dtype": str(model.dtype).removeprefix("torch."),
        **{
            name: [f"{key}={short_repr(value)}" for key, value in found.items()]
            for name, found in settings.items()
            if found
        },
    }


def _gguf(facts: GGUFFacts) -> dict[str, Any]:
    parts = {"files": len(facts.files)} if len(facts.files) > 1 else {}
    return {
        "format": "GGUF",
        "architecture": facts.architecture,
        "tokenizer": facts.pre_tokenizer or facts.tokenizer,
        "tokenizer_kind": GGUF_TOKENIZERS.get(facts.tokenizer, facts.tokenizer),
        "vocabulary": facts.vocabulary,
        "cache": "tree",
        "cache_bytes_per_token": facts.cache_bytes(1, "f16"),
        "parameters": facts.parameters,
        "memory_bytes": facts.weight_bytes,
        "dtype": facts.file_type,
        **parts,
    }


def _spelled(facts: GGUFFacts, ids: frozenset[int]) -> list[str]:
    tokens = read_tokens(facts.files[0])
    return [tokens[number] if number < len(tokens) else str(number) for number in sorted(ids)]


def _tokenizer_kind(tokenizer: Any) -> str:
    """Name the tokenizer's algorithm, and say whether it works on bytes or on characters."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return "slow"
    pipeline = json.loads(fast.to_str())
    kind = str(pipeline["model"]["type"])
    if "ByteLevel" in json.dumps([pipeline["pre_tokenizer"], pipeline["decoder"]]):
        return f"byte-level {kind}"
    return f"{kind} with bytes" if pipeline["model"].get("byte_fallback") else kind
