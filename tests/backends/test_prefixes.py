"""Kept prefixes are found as the plain definition says, at the same cost in a full cache."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from types import FrameType

import numpy as np
import pytest
from typing_extensions import Self

from adafuse_llm.backends import Query, prefixes
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.prefixes import MIN_SHARED, Ids, KeptPrefixes, late, longest
from adafuse_llm.tree import TokenTree
from tests.support.models import Recipe, model, tokenizer


def as_ids(tokens: list[int]) -> Ids:
    return np.array(tokens, dtype=np.int64)


def common(left: list[int], right: list[int]) -> int:
    return next(
        (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )


class Plain:
    """Kept prefixes as a list, which is looked through. The least recently used is first."""

    def __init__(self) -> None:
        self.kept: list[tuple[list[int], int]] = []

    def shared(self, ids: list[int]) -> int:
        return max((common(each, ids) for each, _ in self.kept), default=0)

    def add(self, ids: list[int], value: int) -> set[int]:
        covered = {old for each, old in self.kept if common(each, ids) == len(each)}
        self.kept = [pair for pair in self.kept if pair[1] not in covered]
        self.kept.append((ids, value))
        return covered


def sequence(rng: random.Random) -> list[int]:
    """Tokens of two kinds in runs, so that many sequences begin alike."""
    runs = [[rng.randrange(2)] * rng.choice((1, 2, 3, 9)) for _ in range(rng.randrange(1, 8))]
    return [token for run in runs for token in run]


def check_shape(kept: KeptPrefixes[int]) -> None:
    """Check that every inner branch has at least two children, and no value."""
    pending = [(kept._root, True)]
    leaves = 0
    while pending:
        branch, is_root = pending.pop()
        assert is_root or len(branch.tokens)
        leaves += branch.value is not None
        assert (branch.value is None) == (bool(branch.children) or is_root)
        assert is_root or len(branch.children) != 1
        for token, child in branch.children.items():
            assert token == child.tokens[0]
            assert child.tokens.base is None, "a branch keeps no tokens of others alive"
            assert child.parent() is branch
            pending.append((child, False))
    assert leaves == len(kept)


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(5))
def test_r3_v12_prefixes_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    plain, kept = Plain(), KeptPrefixes[int]()
    for value in range(150):
        ids = sequence(rng)
        length = plain.shared(ids)
        assert kept.shared(as_ids(ids)) == length
        found, same = kept.longest(as_ids(ids))
        assert same == length
        if length:
            (tokens,) = (each for each, old in plain.kept if old == found)
            assert common(tokens, ids) == length
        else:
            assert found is None
        if length and rng.random() < 0.3:
            assert found is not None
            kept.use(found)
            plain.kept.sort(key=lambda pair: pair[1] == found)
        if length < len(ids):
            assert {kept.add(as_ids(ids), value)} - {None} == plain.add(ids, value)
        if rng.random() < 0.3 and plain.kept:
            assert kept.pop_oldest() == plain.kept.pop(0)[1]
        assert list(kept) == [old for _, old in plain.kept]
        check_shape(kept)
    while plain.kept:
        assert kept.pop_oldest() == plain.kept.pop(0)[1]
        check_shape(kept)
    assert not kept._root.children


@pytest.mark.quick
def test_r3_v12_values_are_freed_without_the_garbage_collector() -> None:
    class Rows:
        pass

    kept: KeptPrefixes[Rows] = KeptPrefixes()
    rows = [Rows() for _ in range(4)]
    for number, each in enumerate(rows):
        kept.add(as_ids([1, 2, *[3] * number, 4, 5]), each)
    seen = [weakref.ref(each) for each in rows]
    gc.disable()
    try:
        del rows, each
        kept.pop_oldest()
        assert [each() is None for each in seen] == [True, False, False, False]
        del kept
        assert all(each() is None for each in seen)
    finally:
        gc.enable()


def test_prompts_wait_for_those_that_begin_alike() -> None:
    header, other = list(range(40)), list(range(100, 140))
    prompts = {0: [*header, 1], 1: [*header, 2], 2: [*other, 3], 3: header[:MIN_SHARED], 4: [5]}
    kept: KeptPrefixes[str] = KeptPrefixes()
    assert late(prompts, kept, ()) == {1, 3}
    kept.add(as_ids(header[:30]), "kept")
    assert late(prompts, kept, ()) == set()
    assert late({7: [*other, 8], 9: [*other, 6]}, kept, ()) == {9}
    assert late({7: [*other, 8], 9: [*other, 6]}, kept, [(other, 40, "runs")]) == set()
    assert late({7: [*other, 8], 9: [*other, 6]}, kept, [(other, 20, "runs")]) == {9}


def test_the_longest_prefix_is_kept_or_runs() -> None:
    header = list(range(40))
    kept: KeptPrefixes[str] = KeptPrefixes()
    kept.add(as_ids([*header[:30], 7, 7]), "kept")
    kept.add(as_ids([1, 2]), "other")
    assert longest([*header, 5], kept, ()) == ("kept", 30)
    assert list(kept) == ["other", "kept"]
    assert longest([*header, 5], kept, [(header, 30, "runs")]) == ("kept", 30)
    assert longest([*header, 5], kept, [(header, 31, "runs")]) == ("runs", 31)
    assert longest([*header[:20], 5], kept, [(header, 31, "runs")]) == ("kept", 20)
    assert longest(header[: MIN_SHARED + 1], kept, ()) == ("kept", MIN_SHARED)
    assert longest(header[:MIN_SHARED], kept, ()) is None
    assert longest([5], kept, [([5], 1, "runs")]) is None


class Counter:
    """Counts function calls of this thread, and the tokens that are compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.tokens = 0
        shared = prefixes.shared

        def counted(left: Ids, right: Ids) -> int:
            self.tokens += min(len(left), len(right))
            return shared(left, right)

        monkeypatch.setattr(prefixes, "shared", counted)

    def __enter__(self) -> Self:
        self.calls = self.tokens = 0
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event in ("call", "c_call")


@pytest.mark.parametrize("alike", [0, 40])
def test_r3_v12_a_request_costs_the_same_in_a_full_cache(
    alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a member whose cache is nearly empty, and full, so that it drops the oldest.

    Args:
        alike: number of first tokens that all prompts share.
    """
    recipe = Recipe("llama", seed=71)
    limit = 1500 * 2**10
    member = HuggingFaceBackend(
        model(recipe), tokenizer(recipe.kind), "m", prefix_cache_bytes=limit
    )
    counter = Counter(monkeypatch)
    rng = random.Random(1)

    def batch() -> None:
        """Evaluate the prompts of four requests, and end the requests."""
        trees = [
            TokenTree([*range(100, 100 + alike), *(rng.randrange(3, 400) for _ in range(30))])
            for _ in range(4)
        ]
        member.evaluate([Query(tree, (tree.root,), (), 2) for tree in trees])
        for tree in trees:
            member.release(tree)

    costs = []
    for number in range(40):
        with counter:
            batch()
        costs.append((counter.calls, counter.tokens))
        if number == 2:
            assert len(member._finished._kept) <= 12, "it has room"
    assert len(member._finished._kept) > 30
    assert member._finished.size > limit - limit / 10
    (few_calls, few_tokens), (many_calls, many_tokens) = costs[2], costs[-1]
    assert many_calls < 1.1 * few_calls
    assert many_tokens < 1.3 * few_tokens + 200
