"""The part of a Hugging Face member that needs its tokenizer but not its model."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

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
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    ends = sorted(end_ids)
    spaces = [d["replacement"] for d in _decoders(tokenizer) if d["type"] == "Metaspace"]
    if not spaces:
        return from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
    # llguidance does not read the pieces of Unigram vocabularies as their decoder does
    tokens = TokenizerWrapper(_Pieces(tokenizer, spaces[0], size, ends))
    return LLTokenizer(tokens, n_vocab=size, eos_token=ends)


def _decoders(tokenizer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the decoder of a fast tokenizer and all decoders in it, as dicts."""
    if not getattr(tokenizer, "is_fast", False) or tokenizer.backend_tokenizer.decoder is None:
        return
    pending = [json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())]
    while pending:
        each = pending.pop()
        yield each
        pending += each.get("decoders", ())


class _Pieces:
    """The tokens of a vocabulary in which a character stands for the space.

    Args:
        tokenizer: the tokenizer.
        space: the character.
        size: number of the model's logits.
        ends: ids of the end-of-sequence tokens.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, space: str, size: int, ends: list[int]) -> None:
        added = {int(i): token for i, token in tokenizer.added_tokens_decoder.items()}
        self.eos_token_id = ends[0] if ends else None
        self.special_token_ids = [i for i, token in added.items() if token.special]
        pieces = {i: piece for piece, i in tokenizer.get_vocab().items()}
        self.tokens = [b""] * size
        for token, piece in pieces.items():
            byte = _BYTE.fullmatch(piece)
            text = piece if token in added else piece.replace(space, " ")
            self.tokens[token] = bytes([int(byte[1], 16)]) if byte else text.encode()
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return list(self._tokenizer.encode(text, add_special_tokens=False))
