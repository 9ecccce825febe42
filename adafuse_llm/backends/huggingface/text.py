"""The part of a Hugging Face member that needs its tokenizer but not its model."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from adafuse_llm.text import matchers
from adafuse_llm.text.codec import TokenizerCodec

BYTE_DECODERS = frozenset({"ByteLevel", "ByteFallback", "Metaspace"})
"""Decoders of tokenizers whose tokens have known bytes."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class HuggingFaceText:
    """The text side of a member with a transformers tokenizer.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.codec = TokenizerCodec(tokenizer)

    @functools.cached_property
    def token_texts(self) -> Sequence[str]:
        return self.codec.token_texts()

    @property
    def follows_grammars(self) -> bool:
        """Whether the bytes of the tokens are known."""
        return not BYTE_DECODERS.isdisjoint(each["type"] for each in _decoders(self.tokenizer))

    def grammar_tokenizer(self, size: int, end_ids: Collection[int]) -> Any:
        """Return an ``llguidance.LLTokenizer`` with the tokens.

        Args:
            size: number of the model's logits.
            end_ids: ids of the end-of-sequence tokens.
        """
        return grammar_tokenizer(self.tokenizer, max(size, len(self.tokenizer)), end_ids)


def grammar_tokenizer(tokenizer: Any, size: int, end_ids: Collection[int]) -> Any:
    """Return an ``llguidance.LLTokenizer`` for a fast tokenizer.

    Args:
        tokenizer: a ``PreTrainedTokenizerFast``.
        size: number of the model's logits.
        end_ids: ids of the end-of-sequence tokens.

    Raises:
        ValueError: llguidance cannot read tokenizers of this kind.
    """
    from llguidance.hf import from_tokenizer

    spaces = [d["replacement"] for d in _decoders(tokenizer) if d["type"] == "Metaspace"]
    if not spaces:
        return from_tokenizer(tokenizer, n_vocab=size, eos_token=sorted(end_ids))
    # llguidance does not read the pieces of Unigram vocabularies as their decoder does
    added = {int(i): token for i, token in tokenizer.added_tokens_decoder.items()}
    tokens = [b""] * size
    for piece, token in tokenizer.get_vocab().items():
        byte = _BYTE.fullmatch(piece)
        text = piece if token in added else piece.replace(spaces[0], " ")
        tokens[token] = bytes([int(byte[1], 16)]) if byte else text.encode()

    def encode(text: bytes) -> list[int]:
        return list(tokenizer.encode(text.decode(), add_special_tokens=False))

    special = [i for i, token in added.items() if token.special]
    return matchers.grammar_tokenizer(tokens, end_ids, special, encode)


def _decoders(tokenizer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the decoder of a fast tokenizer and all decoders in it, as dicts."""
    if not getattr(tokenizer, "is_fast", False) or tokenizer.backend_tokenizer.decoder is None:
        return
    pending = [json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())]
    while pending:
        each = pending.pop()
        yield each
        pending += each.get("decoders", ())
