"""The tokens of a member, which can be loaded without its weights."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from adafuse_llm.grammar.matchers import grammar_tokenizer
from adafuse_llm.text.codec import TokenizerCodec


class Vocabulary(ABC):
    """A member's tokenizer, and the codec that uses it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.codec = TokenizerCodec(tokenizer)

    @functools.cached_property
    def token_texts(self) -> Sequence[str]:
        """By token id, the text that a token adds when it does not begin the text."""
        return self.codec.token_texts()

    @property
    def follows_grammars(self) -> bool:
        """Whether the bytes of the tokens are known, which grammars need."""
        return True

    @abstractmethod
    def grammar_tokenizer(self, size: int, end_ids: Collection[int]) -> Any:
        """Return an ``llguidance.LLTokenizer`` for `size` logits, or raise a ValueError."""

    def _with_bytes(self, tokens: Sequence[bytes], end_ids: Collection[int]) -> Any:
        """Return an ``llguidance.LLTokenizer`` for `tokens`, the bytes of every token by id."""

        def encode(text: bytes) -> list[int]:
            return list(self.tokenizer.encode(text.decode(), add_special_tokens=False))

        added = self.tokenizer.added_tokens_decoder.items()
        special = [int(i) for i, token in added if token.special]
        return grammar_tokenizer(tokens, end_ids, special, encode)
