"""Tokens that a mask forbids, in every backend and form."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from adafuse_llm.backends.base import NodeQuery, RestrictsTokens
from adafuse_llm.backends.fake import END, FakeBackend
from adafuse_llm.tree import TokenTree, is_allowed
from tests.support.compare import SINGLE_TOLERANCE, TOLERANCE
from tests.support.models import SINGLE_PRECISION, Recipe, backend, reference

TREE = Recipe("llama", "bytelevel", seed=71)
PATH = Recipe("mamba", "bytelevel", seed=72)
CUT = Recipe("gpt2", "sentencepiece", seed=73)


def mask_of(tokens: Sequence[int]) -> bytes:
    bits = bytearray(max(tokens) // 8 + 1)
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


@pytest.mark.quick
def test_a_mask_says_which_tokens_are_allowed() -> None:
    mask = mask_of([0, 9, 15])
    assert [token for token in range(40) if is_allowed(mask, token)] == [0, 9, 15]


@pytest.mark.parametrize(
    ("recipe", "form"),
    [(TREE, "tree"), (CUT, "tree"), (PATH, "path")],
    ids=["tree", "sentencepiece", "path"],
)
def test_summaries_list_only_allowed_tokens(recipe: Recipe, form: str) -> None:
    member = backend(recipe)
    assert member.form == form
    plain = reference(recipe)
    tolerance = SINGLE_TOLERANCE if recipe.arch in SINGLE_PRECISION else TOLERANCE
    vocabulary = plain.model.config.vocab_size
    chance = random.Random(7)
    for allowed_tokens in (1, 2, 5, 50, vocabulary - 1):
        prompt = list(member.codec.encode_prompt("The ferry to Orrin"))
        tree = TokenTree(prompt)
        tokens = chance.sample(range(vocabulary), 6)
        nodes = [tree.root, *tree.path(tree.grow(tokens[:3])), *tree.path(tree.grow(tokens[3:]))]
        for number, node in enumerate(nodes):
            if number != 2:  # one node of the pass allows all tokens
                node.allowed = mask_of(chance.sample(range(vocabulary), allowed_tokens))
        scored = tuple(node for node in nodes if node.parent)
        (result,) = member.evaluate([NodeQuery(tree, tuple(nodes), scored, top=4)])
        for node, summary in zip(nodes, result.next, strict=True):
            ids = [*prompt, *tree.tokens(node)]
            logprobs = plain.logprobs(ids)
            mask = node.allowed
            allowed = [t for t in range(vocabulary) if mask is None or is_allowed(mask, t)]
            best = sorted(allowed, key=lambda token: (-logprobs[token], token))[:4]
            assert list(summary.tokens) == best
            assert summary.logprobs == pytest.approx(logprobs[best], abs=tolerance)
            assert math.exp(summary.mass) == pytest.approx(
                float(np.exp(logprobs[allowed]).sum()), abs=tolerance
            )
            ends = sorted(plain.end_ids)
            assert math.exp(summary.end_logprob) == pytest.approx(
                float(np.exp(logprobs[ends]).sum()), abs=tolerance
            )
        for node, logprob in zip(scored, result.logprobs, strict=True):
            before = [*prompt, *tree.tokens(node)[:-1]]
            assert logprob == pytest.approx(plain.logprobs(before)[node.token], abs=tolerance)
        member.release(tree)


@pytest.mark.quick
def test_the_fake_lists_only_allowed_tokens() -> None:
    chances = {" a": 0.5, "b": 0.3, END: 0.2}
    member = FakeBackend("one", lambda _: chances, ["x", " a", "b"], is_complete=True)
    assert isinstance(member, RestrictsTokens)
    assert member.token_texts == (END, "x", " a", "b")
    tree = TokenTree(member.codec.encode_prompt("x"))
    tree.root.allowed = mask_of([1, 3])
    (result,) = member.evaluate([NodeQuery(tree, (tree.root,), (), top=4)])
    assert result.next[0].tokens == (3,)
    assert result.next[0].logprobs == pytest.approx((math.log(0.3),))
    assert result.next[0].mass == pytest.approx(math.log(0.3))
    assert result.next[0].margin == pytest.approx(1.0)
    assert result.next[0].end_logprob == pytest.approx(math.log(0.2))
    with pytest.raises(ValueError, match="no token 'c'"):
        member.codec.encode_prompt("c")
    assert FakeBackend("two", lambda _: chances).token_texts is None
