"""GGUF members keep the rules of backends, and write what transformers members write."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adafuse_llm import AdaFuseEngine, InvalidOptionError, LoadError, RuntimeConfig
from adafuse_llm.backends import Backend, Query, TokenTree
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.llamacpp import LlamaCppBackend, backend, context
from adafuse_llm.embedded import member_paths
from adafuse_llm.errors import ContextWindowError, MemberError, UnsupportedModelError
from adafuse_llm.testing import BackendTests
from tests.reference import Options, ReferenceMember, decode
from tests.support.compare import assert_same
from tests.support.gguf_files import embedded_gguf, write_gguf
from tests.support.sizes import sized

pytestmark = pytest.mark.gguf

NAMES = tuple(path.name for path in member_paths())
EXACT: dict[str, Any] = {"flash_attention": False, "cache_type": "f32", "threads": 1}
TOLERANCE = 1e-4
"""Difference of scores between 32-bit numbers and the 64-bit numbers of the reference."""


@functools.cache
def tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(_path(name))


@functools.cache
def model(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(_path(name)).eval()


def _path(name: str) -> Any:
    return next(path for path in member_paths() if path.name == name)


def gguf(name: str, *, kind: str = "f32", **options: Any) -> LlamaCppBackend:
    """An embedded member as a GGUF member."""
    settings = {"context": 4096, **(EXACT if kind == "f32" else {"threads": 1}), **options}
    return LlamaCppBackend(embedded_gguf(name, kind), name, **settings)


@functools.cache
def members() -> tuple[LlamaCppBackend, ...]:
    return tuple(map(gguf, NAMES))


@functools.cache
def references() -> tuple[ReferenceMember, ...]:
    return tuple(
        ReferenceMember(
            name,
            AutoModelForCausalLM.from_pretrained(_path(name)).eval().double(),
            tokenizer(name),
            member.codec,
            member.end_ids,
            member.context_window,
        )
        for name, member in zip(NAMES, members(), strict=True)
    )


def plain_logits(name: str) -> Callable[[Sequence[int]], list[float]]:
    def logits(ids: Sequence[int]) -> list[float]:
        with torch.no_grad():
            row: list[float] = model(name)(torch.tensor([list(ids)])).logits[0, -1].tolist()
        return row

    return logits


class TestRules(BackendTests):
    steps = 20

    def member(self) -> Any:
        return gguf("wren")

    def logits(self, ids: Sequence[int]) -> Any:
        return plain_logits("wren")(ids)


class TestRulesOfQuantizedMembers(BackendTests):
    tolerance = 0.2
    steps = 20

    def member(self) -> Any:
        return gguf("heron", kind="q8_0")


PROMPTS = (
    "The Silesse Mill is a mill. A visit to it costs 4 coins.\n\nQ: What does a visit cost?\nA:",
    "A list:\n - bread, salt and oil\n - rope\n\n",
    "Caf\u00e9 \U0001f600 Orrin   ",
    "\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002",
    "def ferry(time):\n    ",
    "x",
)

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"branching_factor": 5, "margin_threshold": 0.9, "max_words": 2},
    {"temperature": 0.9, "seed": 11, "top_p": 0.9},
    {"temperature": 1.3, "seed": 3, "top_k": 20, "logprobs": True, "top_logprobs": 2},
    {"regex": "[A-Z][a-z]+( [a-z]+){2,4}\\."},
    {"stop": ["a"], "logprobs": True},
)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_an_ensemble_of_gguf_members_equals_the_reference(number: int) -> None:
    prompt = PROMPTS[number]
    for options in (OPTIONS[number], OPTIONS[(number + 2) % len(OPTIONS)]):
        settings = {"max_new_tokens": sized(12, 24), **options}
        expected = decode(list(references()), prompt, Options(**settings))
        for drafting in (False, True):
            ensemble = AdaFuseEngine(members(), runtime=RuntimeConfig(drafting=drafting))
            assert_same(ensemble.generate(prompt, **settings), expected, TOLERANCE)


def test_messages_and_tools_are_read_as_by_the_transformers_members() -> None:
    messages = [{"role": "user", "content": "Who keeps the light?<|end|> [|done|]"}]
    plain = AdaFuseEngine([HuggingFaceBackend(model(n), tokenizer(n), n) for n in NAMES])
    expected = plain.generate(messages=messages, max_new_tokens=24)
    actual = AdaFuseEngine(members()).generate(messages=messages, max_new_tokens=24)
    assert actual.text == expected.text
    assert actual.usage.prompt_tokens == expected.usage.prompt_tokens


def test_every_kind_of_member_mixes_with_every_other() -> None:
    """Eight requests in a batch get the text that each gets alone."""
    mixed = AdaFuseEngine(
        [HuggingFaceBackend(model("wren"), tokenizer("wren"), "wren"), *members()[1:]]
    )
    prompts = [f"{PROMPTS[0]} {number}" for number in range(8)]
    alone = [mixed.generate(prompt, max_new_tokens=16).text for prompt in prompts]
    together = mixed.generate_batch(prompts, max_new_tokens=16)
    assert [each.text for each in together] == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize(
    ("cells", "sequences", "repeatable"), [(4096, 256, False), (1024, 16, False), (1024, 16, True)]
)
def test_random_requests_get_the_numbers_of_transformers(
    cells: int, sequences: int, repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six requests at a time, with and without room for them: requests lose cells and go on."""
    monkeypatch.setattr(context, "MAX_SEQUENCES", sequences)
    monkeypatch.setattr(backend, "PART_NODES", 4 if sequences < 256 else backend.PART_NODES)
    ours = gguf("wren", context=cells, repeatable=repeatable)
    theirs = HuggingFaceBackend(model("wren"), tokenizer("wren"), "wren", prefix_cache_bytes=0)
    sides: tuple[Backend, Backend] = (ours, theirs)
    rng = random.Random(cells + sequences)
    size = len(tokenizer("wren"))
    begin = [rng.randrange(size) for _ in range(60)]
    pairs: list[tuple[TokenTree, TokenTree]] = []
    worst = 0.0
    for _ in range(sized(60, 150)):
        while len(pairs) < 6:
            first = begin[: rng.randint(0, 60)] if rng.random() < 0.6 else []
            ids = [*first, *(rng.randrange(size) for _ in range(rng.randint(1, 80)))]
            pairs.append((TokenTree(ids), TokenTree(ids)))
        for pair in pairs:
            _change(pair, rng, size)
        asked = [pair for pair in pairs if rng.random() < 0.7]
        picks = [_pick(pair[0], rng) for pair in asked]
        results = [
            member.evaluate(
                [_query(pair[side], pick) for pair, pick in zip(asked, picks, strict=True)]
            )
            for side, member in enumerate(sides)
        ]
        for mine, other in zip(*results, strict=True):
            for left, right in zip(mine.next, other.next, strict=True):
                worst = max(worst, *_differences(left.logprobs, right.logprobs))
            worst = max([worst, *_differences(mine.logprobs, other.logprobs)])
        if rng.random() < 0.2:
            left, right = pairs.pop(rng.randrange(len(pairs)))
            ours.release(left)
            theirs.release(right)
    # Flash attention rounds queries, keys, values and its sums to 16 bits, for any cache. On 20
    # random texts of 64 tokens, transformers with these roundings differs from itself as much as
    # llama.cpp does: 0.0023 on average and 0.023 at most (llama.cpp: 0.0023 and 0.022).
    assert worst < (0.1 if repeatable else TOLERANCE)
    for tree, _ in pairs:
        ours.release(tree)
    ours.clear_prefix_cache()
    assert len(ours._context.free) == sequences - 2 * repeatable  # no request keeps a sequence
    ours.close()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("cells", [4096, 700])
def test_repeatable_numbers_depend_on_the_tokens_before_only(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all sizes, in batches, with reused prefixes, and with and without a full cache.

    The numbers of a token are those of a member that runs every token again, alone.
    """
    monkeypatch.setattr(backend, "PIECE_TOKENS", (16, 40))
    ours, other = (gguf("wren", kind="q8_0", context=c, repeatable=True) for c in (cells, 4096))
    rng = random.Random(cells)
    size = len(tokenizer("wren"))
    begin = [rng.randrange(size) for _ in range(90)]
    pairs: list[tuple[TokenTree, TokenTree]] = []
    for _ in range(sized(20, 60)):
        while len(pairs) < 4:
            ids = [*begin[: rng.randint(1, 90)], *(rng.randrange(size) for _ in range(20))]
            pairs.append((TokenTree(ids), TokenTree(ids)))
        for pair in pairs:
            _change(pair, rng, size)
        asked = [pair for pair in pairs if rng.random() < 0.7]
        picks = [_pick(pair[0], rng) for pair in asked]
        together = ours.evaluate(
            [_query(pair[0], pick) for pair, pick in zip(asked, picks, strict=True)]
        )
        for mine, pair, (nodes, _) in zip(together, asked, picks, strict=True):
            known = list(pair[1].nodes())
            for number, got in zip(nodes, mine.next, strict=True):
                plain = TokenTree([*pair[1].ids, *pair[1].tokens(known[number])])
                other.clear_prefix_cache()
                (result,) = other.evaluate([Query(plain, (plain.root,), (), 5)])
                assert got.logprobs == result.next[0].logprobs
                other.release(plain)
        if rng.random() < 0.3:
            ours.release(pairs.pop(rng.randrange(len(pairs)))[0])


def _change(pair: tuple[TokenTree, TokenTree], rng: random.Random, size: int) -> None:
    nodes = [list(tree.nodes()) for tree in pair]
    place, kind = rng.randrange(len(nodes[0])), rng.random()
    tokens = [rng.randrange(size) for _ in range(rng.randint(1, 4))]
    ends = [rng.randrange(len(nodes[0])) for _ in range(3)]
    for tree, known in zip(pair, nodes, strict=True):
        if kind < 0.55 and len(known) < 40:
            tree.grow(tokens, known[place])
        elif kind < 0.75:
            tree.commit(known[place])
        elif kind < 0.9:
            tree.prune([known[end] for end in ends])


def _pick(tree: TokenTree, rng: random.Random) -> tuple[list[int], list[int]]:
    count = len(list(tree.nodes()))
    evaluate = [i for i in range(count) if rng.random() < 0.4] or [0]
    return evaluate, [i for i in range(1, count) if rng.random() < 0.3]


def _query(tree: TokenTree, pick: tuple[list[int], list[int]]) -> Query:
    nodes = list(tree.nodes())
    evaluate, score = (tuple(nodes[i] for i in part) for part in pick)
    return Query(tree, evaluate, score, 5)


def _differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(left, right, strict=True)] or [0.0]


def test_a_cancelled_prompt_stops_at_a_piece_and_a_later_request_goes_on_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "PIECE_TOKENS", (16, 16))
    member, cancel, sizes = gguf(NAMES[0]), threading.Event(), list[int]()
    run = member._context.run

    def count(entries: Sequence[Any]) -> Any:
        sizes.append(len(entries))
        if sizes == [16, 16]:
            cancel.set()
            time.sleep(0.2)  # the scheduler looks every 0.05 seconds
        return run(entries)

    monkeypatch.setattr(member._context, "run", count)
    prompt = "The ferry to Orrin leaves at nine. It carries twelve people and the post. " * 3
    with AdaFuseEngine([member]) as engine:
        assert engine.generate(prompt, cancel=cancel).finish_reason == "cancelled"
        engine.generate("x", max_new_tokens=1)
        assert sizes[:2] == [16, 16]
        assert sizes[2] < 16
        generation = engine.generate(prompt, max_new_tokens=12)
    assert generation.usage.cached_tokens[NAMES[0]] == 32
    expected = decode(list(references()[:1]), prompt, Options(max_new_tokens=12))
    assert_same(generation, expected, TOLERANCE)


def test_a_small_cache_serves_requests_that_need_all_of_it() -> None:
    """A window that is full, and choices that need more nodes than the cache has cells."""
    small = AdaFuseEngine([gguf("wren", context=200)])
    large = AdaFuseEngine([gguf("wren")])
    assert small.context_window == 200
    options: dict[str, Any] = {"max_new_tokens": 1000, "temperature": 2.0}
    prompt = "word " * 90
    responses = [small.generate(prompt, seed=seed, **options) for seed in range(8)]
    assert "length" in {each.finish_reason for each in responses}
    for seed, response in enumerate(responses):
        assert large.generate(prompt, seed=seed, **options).text.startswith(response.text)
    choices = [f"The mill costs {number} coins and it opens at {number}" for number in range(100)]
    assert small.choose(PROMPTS[1], choices=choices).text == (
        large.choose(PROMPTS[1], choices=choices).text
    )
    with pytest.raises(ContextWindowError, match="window of 200"):
        small.generate("word " * 200)


@pytest.mark.parametrize("tokens", [1, 10, 255])
def test_a_tiny_cache_works(tokens: int) -> None:
    member = gguf("wren", context=tokens)
    assert member.context_window == tokens
    tree = TokenTree([5])
    assert member.evaluate([Query(tree, (tree.root,), (), 2)])[0].next


def test_a_full_cache_is_an_error_that_leaves_the_member_usable() -> None:
    member = gguf("wren", context=256)
    tree = TokenTree([5] * 1000)
    with pytest.raises(MemoryError, match=r"GGUFMember\(context=\.\.\.\)"):
        member.evaluate([Query(tree, (tree.root,), (), 2)])
    short = TokenTree([5] * 200)
    assert member.evaluate([Query(short, (short.root,), (), 2)])[0].next


def test_a_cache_that_does_not_fit_the_memory_is_refused_at_once() -> None:
    with pytest.raises(LoadError, match=r"'wren'.*takes [0-9,]+ MiB.*free"):
        gguf("wren", context=10**12)


def test_a_closed_member_says_so() -> None:
    member = gguf("wren")
    ensemble = AdaFuseEngine([member])
    member.close()
    member.close()
    with pytest.raises(MemberError, match=r"'wren'.*closed"):
        ensemble.generate("The mill", max_new_tokens=2)


def test_a_request_that_outlives_its_member_is_released() -> None:
    member = gguf("wren")
    tree = TokenTree(member.codec.encode_prompt("The mill"))
    member.evaluate([Query(tree, (tree.root,), (), 2)])
    member.close()
    member.release(tree)
    assert tree.state is None


def test_eight_threads_share_a_member() -> None:
    ensemble = AdaFuseEngine(members()[:2])
    prompts = [f"Guest {number} pays" for number in range(8)]
    expected = [ensemble.generate(prompt, max_new_tokens=8).text for prompt in prompts]
    got: dict[int, str] = {}

    def ask(number: int) -> None:
        got[number] = ensemble.generate(prompts[number], max_new_tokens=8).text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[number] for number in range(8)] == expected


def test_unknown_end_tokens_are_an_error() -> None:
    with pytest.raises(InvalidOptionError, match=r"spellings of tokens.*'<\|no\|>' is none"):
        gguf("wren", end_tokens=["<|no|>"])


def test_end_tokens_are_added_to_those_of_the_file() -> None:
    plain = gguf("wren")
    assert AdaFuseEngine([plain]).generate(PROMPTS[0], max_new_tokens=4).text
    tree = TokenTree(plain.codec.encode_prompt(PROMPTS[0]))
    (first,) = plain.evaluate([Query(tree, (tree.root,), (), 1)])[0].next[0].tokens
    spelling = tokenizer("wren").convert_ids_to_tokens(first)
    member = gguf("wren", end_tokens=[spelling])
    assert member.end_ids == plain.end_ids | {first}
    ended = AdaFuseEngine([member]).generate(PROMPTS[0], max_new_tokens=4)
    assert (ended.text, ended.finish_reason) == ("", "stop")


def test_a_file_that_is_not_gguf_is_an_error_that_names_it(tmp_path: Any) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(LoadError, match=r"model\.gguf is not a usable GGUF file"):
        LlamaCppBackend(path, "m")


@pytest.mark.parametrize("cache_type", ["f16", "bf16", "q8_0", "q4_0"])
def test_small_cache_types_change_numbers_little(cache_type: str) -> None:
    ids = tokenizer("wren").encode(PROMPTS[0])
    exact, small = (
        member.evaluate([Query(tree, (tree.root,), (), 5)])[0].next[0]
        for member, tree in (
            (gguf("wren"), TokenTree(ids)),
            (gguf("wren", kind="q8_0", cache_type=cache_type), TokenTree(ids)),
        )
    )
    assert small.tokens[0] == exact.tokens[0]
    assert small.logprobs[0] == pytest.approx(exact.logprobs[0], abs=0.5)
    assert small.logprobs != exact.logprobs


def test_memory_is_reckoned() -> None:
    small, large = gguf("wren", context=1024), gguf("wren", context=2048)
    assert small.cache_limit is not None
    assert large.cache_limit is not None
    assert large.cache_limit - small.cache_limit == small.cache_bytes(1024)
    rows = 2 * 5 * 6 * 32 * 4  # keys and values, layers, heads, size of a head, bytes
    assert small.cache_bytes(1) == rows
    assert gguf("wren", context=1024, cache_type="f16").cache_bytes(1) < 0.6 * rows


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Any) -> None:
    folder = tmp_path / "wren"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((_path("wren") / name).read_bytes())
    with pytest.raises(UnsupportedModelError, match="vocabulary"):
        LlamaCppBackend(write_gguf(folder, tmp_path / "wren.gguf"), "wren")
