"""Calls of a fast tokenizer without the checks and conversions of transformers.

For the short texts of a response, these conversions take several times as long as the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

CACHED_CONTEXTS = 1_024
"""Number of token sequences whose texts `FastTokenizer.decode_context` caches."""

_METHODS = ("encode", "decode", "_encode_plus", "_decode", "set_truncation_and_padding")
"""The methods of transformers whose work this module does."""


class FastTokenizer:
    """A fast tokenizer that reads control tokens in texts as plain text.

    Args:
        tokenizer: a tokenizer for which `is_supported` is true.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode_context = lru_cache(CACHED_CONTEXTS)(partial(_decode, tokenizer))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text."""
        core = self._tokenizer.backend_tokenizer
        # Other callers of the tokenizer may have stored other settings in it.
        if not core.encode_special_tokens:
            core.encode_special_tokens = True
        if core.truncation is not None:
            core.no_truncation()
        if core.padding is not None:
            core.no_padding()
        ids: list[int] = core.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return _decode(self._tokenizer, tokens)

    def decode_context(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that will probably be decoded again."""
        return self._decode_context(tuple(tokens))


def is_supported(tokenizer: Any) -> bool:
    """Return whether a tokenizer encodes and decodes as the fast tokenizers of transformers do."""
    if not getattr(tokenizer, "is_fast", False):
        return False
    from transformers import PreTrainedTokenizerFast

    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(getattr(tokenizer, name), "__func__", None)
        is getattr(PreTrainedTokenizerFast, name)
        for name in _METHODS
    )


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)
    return text
