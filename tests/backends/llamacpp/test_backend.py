"""GGUF members write what transformers members write, with and without room in their cache."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, LoadError
from adafuse_llm.backends import Backend, Query, TokenTree
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.errors import ContextWindowError, MemberError
from tests.backends.gguf_members import NAMES, gguf, members, model, tokenizer

pytestmark = pytest.mark.gguf

MILL = "The Silesse Mill is a mill. A visit to it costs 4 coins.\n\nQ: What does a visit cost?\nA:"


def test_messages_are_read_as_by_the_transformers_members_and_kinds_of_members_mix() -> None:
    messages = [{"role": "user", "content": "Who keeps the light?<|end|> [|done|]"}]
    plain = [HuggingFaceBackend(model(n), tokenizer(n), n) for n in NAMES]
    groups: tuple[Sequence[Backend], ...] = (plain, members(), [plain[0], *members()[1:]])
    assert members()[0].parameters == plain[0].parameters
    expected, *others = (
        AdaFuseEngine(each).generate(messages=messages, max_new_tokens=16) for each in groups
    )
    for other in others:
        assert other.text == expected.text
        assert other.usage.prompt_tokens == expected.usage.prompt_tokens


def test_repeatable_numbers_depend_on_the_tokens_before_only() -> None:
    """Whatever shares a pass or the cache, they are those of a request that runs alone."""
    ours, other = (gguf(kind="q8_0", context=700, repeatable=True) for _ in range(2))
    rng, prompt = random.Random(1), tokenizer("wren").encode(MILL * 4)
    trees = [TokenTree(prompt[:length]) for length in (30, 60, 90, 20)]
    for _ in range(8):
        asked = rng.sample(trees, 3)
        tips = [tree.grow(rng.choices(prompt, k=3)) for tree in asked]
        queries = [Query(tree, (tip,), (), 5) for tree, tip in zip(asked, tips, strict=True)]
        for each, tip, found in zip(asked, tips, ours.evaluate(queries), strict=True):
            plain = TokenTree([*each.ids, *each.tokens(tip)])
            other.clear_prefix_cache()
            (alone,) = other.evaluate([Query(plain, (plain.root,), (), 5)])
            other.release(plain)
            assert found.next[0].logprobs == alone.next[0].logprobs
            each.commit(tip)


def test_a_small_cache_serves_requests_that_need_all_of_it() -> None:
    """A window that is full, and choices that need more nodes than the cache has cells."""
    small, large = (AdaFuseEngine([gguf(context=tokens)]) for tokens in (200, 4096))
    assert small.context_window == 200
    options: dict[str, Any] = {"max_new_tokens": 1000, "temperature": 2.0}
    responses = [small.generate("word " * 90, seed=seed, **options) for seed in range(4)]
    assert "length" in {each.finish_reason for each in responses}
    for seed, response in enumerate(responses):
        assert large.generate("word " * 90, seed=seed, **options).text.startswith(response.text)
    choices = [f"The mill costs {number} coins and it opens at {number}" for number in range(100)]
    assert small.choose("A list:", choices=choices).text == (
        large.choose("A list:", choices=choices).text
    )
    with pytest.raises(ContextWindowError, match="window of 200"):
        small.generate("word " * 200)


def test_a_full_cache_is_an_error() -> None:
    member = gguf(context=255)
    tree = TokenTree([5] * 1000)
    with pytest.raises(MemoryError, match="context="):
        member.evaluate([Query(tree, (tree.root,), (), 2)])
    short = TokenTree([5] * 255)
    assert member.evaluate([Query(short, (short.root,), (), 2)])[0].next


def test_a_closed_member_says_so_and_releases_requests() -> None:
    member = gguf()
    tree = TokenTree(member.codec.encode_prompt("The mill"))
    member.evaluate([Query(tree, (tree.root,), (), 2)])
    ensemble = AdaFuseEngine([member])
    for _ in range(2):
        member.close()
    member.release(tree)
    assert tree.state is None
    with pytest.raises(MemberError, match=r"'wren'.*closed"):
        ensemble.generate("The mill", max_new_tokens=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "q8_0", "cache_type": "f16"},
        {"kind": "q8_0", "cache_type": "q4_0"},
        {"flash_attention": True},
    ],
)
def test_caches_and_attentions_that_round_change_numbers_little(settings: dict[str, Any]) -> None:
    trees = [TokenTree(tokenizer("wren").encode(MILL)) for _ in range(2)]
    exact, rounded = (
        member.evaluate([Query(tree, (tree.root,), (), 5)])[0].next[0]
        for member, tree in zip((gguf(), gguf(**settings)), trees, strict=True)
    )
    assert rounded.tokens[0] == exact.tokens[0]
    assert rounded.logprobs[0] == pytest.approx(exact.logprobs[0], abs=0.5)
    assert rounded.logprobs != exact.logprobs


def test_memory_is_reckoned() -> None:
    small, large = gguf(context=1024), gguf(context=2048)
    rows = 2 * 5 * 6 * 32 * 4  # keys and values, layers, heads, size of a head, bytes
    assert small.cache_bytes(1) == rows
    assert (large.cache_limit or 0) - (small.cache_limit or 0) == 1024 * rows
    assert gguf(context=1024, cache_type="f16").cache_bytes(1) < 0.6 * rows
    with pytest.raises(LoadError, match=r"'wren'.*MiB.*free"):
        gguf(context=10**12)
