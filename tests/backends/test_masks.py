"""Tokens that a mask forbids, and how a fake follows them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from adafuse_llm.backends.base import Query
from adafuse_llm.backends.fake import END, FakeBackend
from adafuse_llm.tree import TokenTree, is_allowed


def mask_of(tokens: Sequence[int]) -> bytes:
    bits = bytearray(max(tokens) // 8 + 1)
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


@pytest.mark.quick
def test_a_mask_says_which_tokens_are_allowed() -> None:
    mask = mask_of([0, 9, 15])
    assert [token for token in range(40) if is_allowed(mask, token)] == [0, 9, 15]


@pytest.mark.quick
def test_the_fake_lists_only_allowed_tokens() -> None:
    chances = {" a": 0.5, "b": 0.3, END: 0.2}
    member = FakeBackend("one", lambda _: chances, ["x", " a", "b"], is_complete=True)
    assert member.token_texts == (END, "x", " a", "b")
    tree = TokenTree(member.codec.encode_prompt("x"))
    tree.root.allowed = mask_of([1, 3])
    (result,) = member.evaluate([Query(tree, (tree.root,), (), top=4)])
    assert result.next[0].tokens == (3,)
    assert result.next[0].logprobs == pytest.approx((math.log(0.3),))
    assert result.next[0].mass == pytest.approx(math.log(0.3))
    assert result.next[0].margin == pytest.approx(1.0)
    assert result.next[0].end_logprob == pytest.approx(math.log(0.2))
    with pytest.raises(ValueError, match="no token 'c'"):
        member.codec.encode_prompt("c")
    assert FakeBackend("two", lambda _: chances).token_texts is None
