"""Kept prefixes are those of the definition, and prompts wait for what they can reuse."""

import random

import numpy as np
import pytest

from adafuse_llm.backends.prefixes import MIN_SHARED, Ids, PrefixCache

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
    kept = PrefixCache[int](limit := 400, most_kept := 12)
    for value in range(200):
        ids = sequence(rng)
        most = max((common(each, ids[:-1]) for each in plain.values()), default=0)
        found = kept.longest(ids, ())
        assert (found[1] if found else 0) == (most if most >= MIN_SHARED else 0)
        if found:
            assert common(plain[found[0]], ids[:-1]) == most
            plain[found[0]] = plain.pop(found[0])
        is_known = any(common(each, ids) == len(ids) for each in plain.values())
        fitting = kept.fitting(ids)
        assert fitting.tolist() == ([] if is_known or len(ids) < MIN_SHARED else ids)
        if len(fitting):
            covered = [old for old, each in plain.items() if common(each, ids) == len(each)]
            plain = {old: each for old, each in plain.items() if old not in covered}
            plain[value] = ids
            while sum(map(len, plain.values())) > limit or len(plain) > most_kept:
                covered.append(next(iter(plain)))
                del plain[covered[-1]]
            assert kept.add(fitting, value) == covered
        assert list(kept._ids) == list(plain)


def test_prompts_wait_for_those_that_begin_alike() -> None:
    header, other = list(range(40)), list(range(100, 140))
    prompts = {0: [*header, 1], 1: [*header, 2], 2: [*other, 3], 3: header[:MIN_SHARED], 4: [5]}
    kept: PrefixCache[str] = PrefixCache(1000)
    assert kept.late(prompts, ()) == {1, 3}
    kept.add(as_ids(header[:30]), "kept")
    assert kept.late(prompts, ()) == set()
    assert kept.late({7: [*other, 8], 9: [*other, 6]}, ()) == {9}
    assert kept.late({7: [*other, 8], 9: [*other, 6]}, [(other, 40, "runs")]) == set()
    assert kept.late({7: [*other, 8], 9: [*other, 6]}, [(other, 20, "runs")]) == {9}


def test_the_longest_prefix_is_kept_or_runs() -> None:
    header = list(range(40))
    kept: PrefixCache[str] = PrefixCache(1000)
    kept.add(as_ids([*header[:30], 7, 7]), "kept")
    assert kept.longest([*header, 5], [(header, 30, "runs")]) == ("kept", 30)
    assert kept.longest([*header, 5], [(header, 31, "runs")]) == ("runs", 31)
    assert kept.longest([*header[:20], 5], [(header, 31, "runs")]) == ("kept", 20)
    assert kept.longest([5], [([5], 1, "runs")]) is None
    assert PrefixCache[str](20).fitting(header).tolist() == header[:20]
