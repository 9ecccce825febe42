"""Kept prefixes are those of the definition, and prompts wait for what they can reuse."""

from __future__ import annotations

import random

import numpy as np
import pytest

from adafuse_llm.backends.prefixes import MIN_SHARED, Ids, KeptPrefixes, late, longest

pytestmark = pytest.mark.quick


def as_ids(tokens: list[int]) -> Ids:
    return np.array(tokens, dtype=np.int64)


def common(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def sequence(rng: random.Random) -> list[int]:
    """Tokens of two kinds in runs, so that many sequences begin alike."""
    runs = [[rng.randrange(2)] * rng.choice((1, 2, 3, 9, 20)) for _ in range(rng.randrange(1, 8))]
    return [token for run in runs for token in run]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_and_found_is_what_the_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    plain: dict[int, list[int]] = {}  # the least recently used is first
    kept = KeptPrefixes[int]()
    for value in range(150):
        ids = sequence(rng)
        most = max((common(each, ids[:-1]) for each in plain.values()), default=0)
        found = longest(ids, kept, ())
        assert (found[1] if found else 0) == (most if most >= MIN_SHARED else 0)
        if found:
            assert common(plain[found[0]], ids[:-1]) == most
            plain[found[0]] = plain.pop(found[0])
        if kept.shared(as_ids(ids)) < len(ids):
            covered = [old for old, each in plain.items() if common(each, ids) == len(each)]
            assert kept.add(as_ids(ids), value) == (covered[0] if covered else None)
            plain = {old: each for old, each in plain.items() if old not in covered}
            plain[value] = ids
        if rng.random() < 0.3 and plain:
            oldest = next(iter(plain))
            assert kept.pop_oldest() == oldest
            del plain[oldest]
        assert list(kept) == list(plain)


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
