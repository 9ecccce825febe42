"""Compiled grammars that are kept: their measured memory, and what is dropped for it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseConfig
from adafuse_llm.runtime.vocabularies import read_grammar_vocabulary
from adafuse_llm.text import grammar_cache
from adafuse_llm.text.grammar import NO_LEAD, Grammar, GrammarText, GrammarVocabulary
from adafuse_llm.text.grammar_cache import MAX_GRAMMARS, GrammarCache
from tests.support.hostile import SWELLING
from tests.support.models import Recipe, backend

SWELLS = r"(\w*\d\w{14}\D)+"


def vocabulary() -> GrammarVocabulary:
    return read_grammar_vocabulary(backend(Recipe("llama", "bytelevel", seed=1)))


def grammar_of(regex: str) -> Grammar:
    grammar = Grammar.of(AdaFuseConfig(regex=regex))
    assert grammar is not None
    return grammar


def read_much(text: GrammarText, steps: int = 400) -> None:
    """Read random texts, so that the lexer of the grammar grows."""
    rng = random.Random(0)
    for _ in range(steps):
        follows = [char for char in "0189abxyz -" if text.holds(char)]
        text.commit(rng.choice(follows))


def test_r3_v2_the_cache_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "MAX_BYTES", 2_000_000)
    known = vocabulary()
    for number in range(6):
        schema = {"enum": [f"{number} {other}" for other in range(400)]}
        grammar = Grammar.of(AdaFuseConfig(json_schema=schema))
        assert grammar is not None
        known.matcher(grammar, NO_LEAD)
    assert 1 < len(known._matchers) < 6
    assert 400_000 < known._matchers.size <= 2_000_000


def test_r3_v2_a_grammar_that_has_grown_is_measured_and_compiled_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    growth = 500_000
    monkeypatch.setattr(grammar_cache, "MAX_GROWTH", growth)
    first = grammar_of(SWELLS)
    size = first.size
    assert size is not None
    read_much(first.text())
    assert first.size is not None
    assert first.size > size + growth
    again = grammar_of(SWELLS)
    assert again is not first
    assert again.size is not None
    assert again.size < size + growth
    assert grammar_of(SWELLS) is again


def test_r3_v2_a_grammar_that_reached_a_limit_is_compiled_anew() -> None:
    known, grammar = vocabulary(), grammar_of("[a-d]+")
    state = known.matcher(grammar, NO_LEAD)
    entry = next(iter(known._matchers._entries.values()))
    entry.value.matcher.consume_token(2**31 - 1)  # as if its lexer had too many states
    assert entry.value.size is None
    assert not known.mask(known.matcher(grammar, NO_LEAD)).is_empty
    assert not known.mask(state).is_empty


@pytest.mark.quick
def test_the_cache_drops_what_was_used_the_longest_ago() -> None:
    sizes: dict[int, int] = {}
    cache: GrammarCache[int] = GrammarCache(lambda value: sizes.get(value, 1))
    made: list[int] = []

    def make(value: int) -> Callable[[], int]:
        def compile_grammar() -> int:
            made.append(value)
            return value

        return compile_grammar

    for value in (*range(MAX_GRAMMARS), 0, MAX_GRAMMARS):
        assert cache.get(value, make(value)) == value
    assert len(cache) == cache.size == MAX_GRAMMARS
    assert made == [*range(MAX_GRAMMARS + 1)]
    cache.get(0, make(0))
    cache.get(1, make(1))
    assert made[-1] == 1
    sizes[5] = grammar_cache.MAX_BYTES
    sizes[6] = grammar_cache.MAX_BYTES + 1
    cache.get(100, lambda: 6)
    assert len(cache) == 1
    cache.get(101, lambda: 5)
    assert (len(cache), cache.size) == (1, grammar_cache.MAX_BYTES)


MEASURE = """
import random, sys
from pathlib import Path
from adafuse_llm.text.matchers import (
    BYTES_PER_CHARACTER, BYTES_PER_FUEL, HEADER, byte_tokenizer, compiled, lexer_fuel, next_bytes
)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

rng = random.Random(0)
lexer_fuel(compiled(byte_tokenizer(), f'{HEADER}\\nstart: "a"'))
before = resident()
lark = f"{HEADER}\\nstart: /{sys.argv[1]}/"
matcher = compiled(byte_tokenizer(), lark)
for _ in range(100):
    state = matcher.deep_copy()
    for _ in range(60):
        follows = next_bytes(state)
        likely = [byte for byte in b"abcdx019-" if byte in follows]
        state.consume_token(rng.choice(likely or follows))
    if (fuel := lexer_fuel(matcher)) > 400_000:
        break
del state
print(resident() - before, BYTES_PER_FUEL * fuel + BYTES_PER_CHARACTER * len(lark))
"""


@pytest.mark.sweep(2)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "regex", [*SWELLING[:2], SWELLS, r"(\p{L}|\p{N}){1,4000}x", r"(.*[ab].{9}[cd].{9}){3}"]
)
def test_r3_v2_a_grammar_takes_no_more_than_its_measured_bytes(regex: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, regex],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    grown, measured = map(int, done.stdout.split())
    assert grown < measured < 40 * grown


def test_r3_v2_a_grammar_that_grows_and_is_never_asked_for_again_is_forgotten() -> None:
    sizes = dict.fromkeys(range(8), 1_000)
    cache: GrammarCache[int] = GrammarCache(sizes.get)
    for number in range(5):
        cache.get(number, lambda number=number: number)  # type: ignore[misc]
    sizes[1] += grammar_cache.MAX_GROWTH + 1
    sizes[2] += 500
    del sizes[3]
    for _ in range(2):
        cache.get(4, lambda: 4)
    assert set(cache._entries) == {0, 2, 4}
    assert cache.size == 3_500
