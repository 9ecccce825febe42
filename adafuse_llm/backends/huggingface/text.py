"""The part of a Hugging Face member that needs its tokenizer but not its model."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

from adafuse_llm.backends.huggingface.grammar_tokens import follows_grammars, grammar_tokenizer
from adafuse_llm.text.codec import TokenizerCodec


class HuggingFaceText:
    """The text side of a member with a transformers tokenizer.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._codec = TokenizerCodec(tokenizer)

    @property
    def codec(self) -> TokenizerCodec:
        return self._codec

    @functools.cached_property
    def token_texts(self) -> Sequence[str]:
        return self._codec.token_texts()

    @property
    def follows_grammars(self) -> bool:
        return follows_grammars(self.tokenizer)

    def grammar_tokenizer(self, size: int, end_ids: Collection[int]) -> Any:
        """Return an ``llguidance.LLTokenizer`` with the tokens.

        Args:
            size: number of the model's logits.
            end_ids: ids of the end-of-sequence tokens.
        """
        return grammar_tokenizer(self.tokenizer, max(size, len(self.tokenizer)), end_ids)
