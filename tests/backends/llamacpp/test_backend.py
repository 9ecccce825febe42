"""GGUF members write what transformers members write, with and without room in their cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, InvalidOptionError, LoadError, RuntimeConfig
from adafuse_llm.backends import Backend, Query, TokenTree
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.llamacpp import backend, context
from adafuse_llm.errors import ContextWindowError, MemberError
from tests.backends.gguf_members import (
    NAMES,
    TOLERANCE,
    gguf,
    members,
    model,
    references,
    tokenizer,
)
from tests.reference import Options, decode
from tests.support.compare import assert_same
from tests.support.sizes import sized

pytestmark = pytest.mark.gguf

MILL = "The Silesse Mill is a mill. A visit to it costs 4 coins.\n\nQ: What does a visit cost?\nA:"
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    (MILL, {}),
    ("A list:\n - bread, salt and oil\n", {"branching_factor": 5, "max_words": 2}),
    ("Caf\u00e9 \U0001f600 Orrin   ", {"temperature": 0.9, "seed": 11, "top_p": 0.9}),
    ("\u4e2d\u6587\u6ca1\u6709\u3002", {"regex": "[A-Z][a-z]+( [a-z]+){2,4}\\."}),
    ("x", {"stop": ["a"], "logprobs": True, "top_logprobs": 2}),
)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("prompt", "options"), CASES, ids=["plain", "branches", "draws", "grammar", "stop"]
)
def test_an_ensemble_of_gguf_members_equals_the_reference(
    prompt: str, options: dict[str, Any]
) -> None:
    options = {"max_new_tokens": sized(12, 24), **options}
    expected = decode(list(references()), prompt, Options(**options))
    for drafting in (False, True):
        ensemble = AdaFuseEngine(members(), runtime=RuntimeConfig(drafting=drafting))
        assert_same(ensemble.generate(prompt, **options), expected, TOLERANCE)


def test_messages_are_read_as_by_the_transformers_members_and_kinds_of_members_mix() -> None:
    messages = [{"role": "user", "content": "Who keeps the light?<|end|> [|done|]"}]
    plain = [HuggingFaceBackend(model(n), tokenizer(n), n) for n in NAMES]
    groups: tuple[Sequence[Backend], ...] = (plain, members(), [plain[0], *members()[1:]])
    expected, *others = (
        AdaFuseEngine(each).generate(messages=messages, max_new_tokens=16) for each in groups
    )
    for other in others:
        assert other.text == expected.text
        assert other.usage.prompt_tokens == expected.usage.prompt_tokens
    engine = AdaFuseEngine(members()[:2])
    prompts = [f"{MILL} {number}" for number in range(8)]
    alone = [engine.generate(prompt, max_new_tokens=8).text for prompt in prompts]
    assert [each.text for each in engine.generate_batch(prompts, max_new_tokens=8)] == alone
    assert len(set(alone)) > 1


class Requests:
    """Requests at random, each as two trees, of which one is for our member."""

    def __init__(self, seed: int, count: int, shared: int) -> None:
        self.rng = random.Random(seed)
        self.size = len(tokenizer("wren"))
        self.begin = [self.rng.randrange(self.size) for _ in range(shared)]
        self.count = count
        self.pairs: list[tuple[TokenTree, TokenTree]] = []

    def change(self) -> tuple[list[tuple[TokenTree, TokenTree]], list[Any]]:
        """Begin, grow, commit and prune requests. Return some of them, and nodes by number."""
        rng = self.rng
        while len(self.pairs) < self.count:
            first = self.begin[: rng.randint(0, len(self.begin))] if rng.random() < 0.6 else []
            ids = [*first, *(rng.randrange(self.size) for _ in range(rng.randint(1, 80)))]
            self.pairs.append((TokenTree(ids), TokenTree(ids)))
        for pair in self.pairs:
            nodes = [list(tree.nodes()) for tree in pair]
            place, kind = rng.randrange(len(nodes[0])), rng.random()
            tokens = [rng.randrange(self.size) for _ in range(rng.randint(1, 4))]
            ends = [rng.randrange(len(nodes[0])) for _ in range(3)]
            for tree, known in zip(pair, nodes, strict=True):
                if kind < 0.55 and len(known) < 40:
                    tree.grow(tokens, known[place])
                elif kind < 0.75:
                    tree.commit(known[place])
                elif kind < 0.9:
                    tree.prune([known[end] for end in ends])
        asked = [pair for pair in self.pairs if rng.random() < 0.7]
        picks = []
        for tree, _ in asked:
            count = len(list(tree.nodes()))
            evaluate = [i for i in range(count) if rng.random() < 0.4] or [0]
            picks.append((evaluate, [i for i in range(1, count) if rng.random() < 0.3]))
        return asked, picks

    def end_one(self) -> tuple[TokenTree, TokenTree]:
        return self.pairs.pop(self.rng.randrange(len(self.pairs)))


def query(tree: TokenTree, pick: tuple[list[int], list[int]]) -> Query:
    nodes = list(tree.nodes())
    evaluate, score = (tuple(nodes[i] for i in part) for part in pick)
    return Query(tree, evaluate, score, 5)


def difference(left: Sequence[float], right: Sequence[float]) -> float:
    return max((abs(one - other) for one, other in zip(left, right, strict=True)), default=0.0)


@pytest.mark.parametrize(
    ("cells", "sequences", "repeatable"), [(4096, 256, False), (1024, 16, False), (1024, 16, True)]
)
def test_random_requests_get_the_numbers_of_transformers(
    cells: int, sequences: int, repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six requests at a time, with and without room for them: requests lose cells and go on."""
    monkeypatch.setattr(context, "MAX_SEQUENCES", sequences)
    monkeypatch.setattr(backend, "PART_NODES", 4 if sequences < 256 else backend.PART_NODES)
    ours = gguf(context=cells, repeatable=repeatable)
    theirs = HuggingFaceBackend(model("wren"), tokenizer("wren"), "wren", prefix_cache_bytes=0)
    sides: tuple[Backend, Backend] = (ours, theirs)
    requests, worst = Requests(cells + sequences, 6, 60), 0.0
    for _ in range(sized(60, 150)):
        asked, picks = requests.change()
        results = [
            member.evaluate([query(pair[side], p) for pair, p in zip(asked, picks, strict=True)])
            for side, member in enumerate(sides)
        ]
        for mine, other in zip(*results, strict=True):
            for left, right in zip(mine.next, other.next, strict=True):
                worst = max(worst, difference(left.logprobs, right.logprobs))
            worst = max(worst, difference(mine.logprobs, other.logprobs))
        if requests.rng.random() < 0.2:
            for member, tree in zip(sides, requests.end_one(), strict=True):
                member.release(tree)
    # Flash attention rounds queries, keys, values and its sums to 16 bits, for any cache. On 20
    # random texts of 64 tokens, transformers with these roundings differs from itself as much as
    # llama.cpp does: 0.0023 on average and 0.023 at most (llama.cpp: 0.0023 and 0.022).
    assert worst < (0.1 if repeatable else TOLERANCE)
    for tree, _ in requests.pairs:
        ours.release(tree)
    ours.clear_prefix_cache()
    assert len(ours._context.free) == sequences - 2 * repeatable  # no request keeps a sequence
    ours.close()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("cells", [4096, 700])
def test_repeatable_numbers_depend_on_the_tokens_before_only(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of a token are those of a member that runs every token again, alone."""
    monkeypatch.setattr(backend, "PIECE_TOKENS", (16, 40))
    ours, other = (gguf(kind="q8_0", context=c, repeatable=True) for c in (cells, 4096))
    requests = Requests(cells, 4, 90)
    for _ in range(sized(12, 60)):
        asked, picks = requests.change()
        together = ours.evaluate([query(p[0], pick) for p, pick in zip(asked, picks, strict=True)])
        for mine, (_, tree), (nodes, _) in zip(together, asked, picks, strict=True):
            known = list(tree.nodes())
            for number, got in zip(nodes, mine.next, strict=True):
                plain = TokenTree([*tree.ids, *tree.tokens(known[number])])
                other.clear_prefix_cache()
                (result,) = other.evaluate([Query(plain, (plain.root,), (), 5)])
                assert got.logprobs == result.next[0].logprobs
                other.release(plain)
        if requests.rng.random() < 0.3:
            ours.release(requests.end_one()[0])


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


@pytest.mark.parametrize("tokens", [1, 255])
def test_a_tiny_cache_works_and_a_full_one_is_an_error(tokens: int) -> None:
    member = gguf(context=tokens)
    assert member.context_window == tokens
    tree = TokenTree([5] * 1000)
    with pytest.raises(MemoryError, match="context="):
        member.evaluate([Query(tree, (tree.root,), (), 2)])
    short = TokenTree([5] * tokens)
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


def test_end_tokens_are_added_to_those_of_the_file() -> None:
    plain = members()[0]
    tree = TokenTree(plain.codec.encode_prompt(MILL))
    (first,) = plain.evaluate([Query(tree, (tree.root,), (), 1)])[0].next[0].tokens
    member = gguf(end_tokens=[tokenizer("wren").convert_ids_to_tokens(first)])
    assert member.end_ids == plain.end_ids | {first}
    ended = AdaFuseEngine([member]).generate(MILL, max_new_tokens=4)
    assert (ended.text, ended.finish_reason) == ("", "stop")
    with pytest.raises(InvalidOptionError, match=r"end_tokens.*'<\|no\|>'"):
        gguf(end_tokens=["<|no|>"])


@pytest.mark.parametrize(
    "settings",
    [
        *({"kind": "q8_0", "cache_type": name} for name in ("f16", "bf16", "q8_0", "q4_0")),
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
