"""Tokenizers that the tests make, and real ones where their files are present."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support.models import TOKENIZER_KINDS, tokenizer
from tests.support.paths import TOKENIZERS

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]


@functools.cache
def known_tokenizer(kind: str) -> Any:
    """A tokenizer of our own making, or one of the real ones; skips where that is absent."""
    if kind in TOKENIZER_KINDS:
        return tokenizer(kind)
    import transformers

    if kind == "llama2":
        folder = TOKENIZERS / "llama2-sentencepiece"
        if not folder.is_dir():
            pytest.skip("the Llama 2 tokenizer is not here")
        return transformers.LlamaTokenizer.from_pretrained(folder)
    pytest.importorskip("tiktoken")
    ranks = TOKENIZERS / "llama3-tiktoken" / "tokenizer.model"
    if not ranks.is_file():
        pytest.skip("the Llama 3 tokenizer is not here")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    core = TikTokenConverter(
        vocab_file=str(ranks), pattern=LLAMA3_PATTERN, extra_special_tokens=LLAMA3_SPECIAL
    ).converted()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
    )
