"""A codec calls a fast tokenizer directly, unless the tokenizer is of another kind."""

from __future__ import annotations

import copy

import pytest

from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.text.fast_tokenizer import FastTokenizer, is_supported
from tests.support.models import tokenizer

TEXT = "The ferry to Orrin leaves at nine."


@pytest.mark.quick
def test_settings_of_other_callers_do_not_change_the_tokens() -> None:
    known = copy.deepcopy(tokenizer("bytelevel"))
    codec = TokenizerCodec(known)
    tokens = codec.encode_prompt(TEXT)
    known(TEXT, truncation=True, max_length=2)
    known.pad_token = known.eos_token
    known([TEXT, "a"], padding="max_length", max_length=64, split_special_tokens=False)
    assert codec.encode_prompt(TEXT) == tokens
    assert codec.encode_continuation(tokens, f" {TEXT}")[1]


@pytest.mark.quick
def test_direct_calls_equal_those_of_transformers() -> None:
    known = tokenizer("sentencepiece")
    fast = FastTokenizer(known)
    for special in (True, False):
        expected = known.encode(TEXT, add_special_tokens=special, split_special_tokens=True)
        assert fast.encode(TEXT, add_special_tokens=special) == expected
    text = known.decode(expected, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert fast.decode(expected) == fast.decode_context(expected) == text


@pytest.mark.quick
def test_a_tokenizer_with_its_own_methods_is_not_called_directly() -> None:
    known = copy.deepcopy(tokenizer("bytelevel"))
    assert is_supported(known)
    known.decode = lambda tokens, **_: "-".join(map(str, tokens))
    assert not is_supported(known)
    assert TokenizerCodec(known).decode_continuation([], [1, 2]) == "1-2"
