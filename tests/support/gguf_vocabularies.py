"""Write Hugging Face tokenizers as GGUF files that hold nothing but a vocabulary, and read them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType

from adafuse_llm.backends.gguf import read_facts
from adafuse_llm.backends.llamacpp.library import Settings
from adafuse_llm.backends.llamacpp.trial import load
from adafuse_llm.backends.llamacpp.vocabulary import LlamaVocabulary

Tokens = list[tuple[str, float]]
"""The spelling and the score of every token, by id."""


def read_vocabulary(path: Path) -> LlamaVocabulary:
    """Load the vocabulary of a GGUF file, without its weights."""
    return load(read_facts(path), f"member {path.stem!r}", Settings(vocabulary_only=True))[1]


def write_vocabulary(
    path: Path, tokenizer: Any, *, pre: str = "gpt-2", template: Any = None
) -> Path:
    """Write a fast tokenizer to a GGUF file; `pre` is llama.cpp's name of the pre-tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    add_vocabulary(
        writer, tokenizer, pre, tokenizer.chat_template if template is None else template
    )
    return finish(writer, path)


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Any, pre: str, template: Any) -> None:
    """Add the tokens, special tokens and templates of a fast tokenizer to a file."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    pieces = _pieces(model)
    for number, token in sorted(tokenizer.added_tokens_decoder.items()):
        pieces[number:] = [(str(token), 0.0)] if number >= len(pieces) else pieces[number:]
    added = tokenizer.added_tokens_decoder
    types = [
        _type(text, added.get(number), has_bytes=model["byte_fallback"])
        for number, (text, _) in enumerate(pieces)
    ]
    if model["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([score for _, score in pieces])
        writer.add_add_space_prefix(_has_prefix(tokenizer))
        writer.add_remove_extra_whitespaces(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_token_list([text for text, _ in pieces])
    writer.add_token_types(types)
    _add_special_tokens(writer, tokenizer)
    if isinstance(template, Mapping):
        named = [{"name": name, "template": text} for name, text in template.items()]
        writer.add_chat_template(named)
    elif template:
        writer.add_chat_template(template)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write all that was added to a file, and return its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_pieces(
    path: Path, model: str, pieces: Sequence[str], types: Sequence[TokenType], **options: Any
) -> Path:
    """Write a made-up vocabulary to `path`; `options` name entries of the metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pieces:
        writer.add_token_list(list(pieces))
        writer.add_token_types(list(types))
        writer.add_token_scores([0.0] * len(pieces))
        writer.add_token_merges([f"{pieces[0]} {pieces[-1]}"])
    for key, value in options.items():
        getattr(writer, f"add_{key}")(value)
    return finish(writer, path)


def _pieces(model: Mapping[str, Any]) -> Tokens:
    texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        ranks.setdefault("".join(pair), rank)
    return [(text, -float(ranks.get(text, 10**6))) for text in texts]


def _type(text: str, added: Any, *, has_bytes: bool) -> TokenType:
    if added is not None:
        return TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    is_byte = has_bytes and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return TokenType.BYTE if is_byte else TokenType.NORMAL


def _has_prefix(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a space before a text."""
    (first, *_) = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).tokens
    return bool(first[:1] == "\u2581")


def _add_special_tokens(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    adders = {
        writer.add_bos_token_id: tokenizer.bos_token_id,
        writer.add_eos_token_id: tokenizer.eos_token_id,
        writer.add_pad_token_id: tokenizer.pad_token_id,
        writer.add_unk_token_id: tokenizer.unk_token_id,
    }
    for add, token in adders.items():
        if token is not None:
            add(token)
    tokens = tokenizer.encode("a", add_special_tokens=True)
    writer.add_add_bos_token(tokens[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokens[-1] == tokenizer.eos_token_id)
