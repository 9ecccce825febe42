"""Compiled grammars that are kept, and which of them are dropped."""

from __future__ import annotations

import pytest

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseConfig
from adafuse_llm.runtime.vocabularies import read_grammar_vocabulary
from adafuse_llm.text.grammar import NO_LEAD, Grammar, GrammarVocabulary
from adafuse_llm.text.grammar_cache import MAX_GRAMMARS, GrammarCache
from tests.support.models import Recipe, backend


def vocabulary() -> GrammarVocabulary:
    return read_grammar_vocabulary(backend(Recipe("llama", "bytelevel", seed=1)))


def grammar_of(regex: str) -> Grammar:
    grammar = Grammar.of(AdaFuseConfig(regex=regex))
    assert grammar is not None
    return grammar


def test_a_grammar_that_reached_a_limit_is_compiled_anew() -> None:
    known, grammar = vocabulary(), grammar_of("[a-d]+")
    state = known.matcher(grammar, NO_LEAD)
    kept = next(iter(known._matchers._kept.values()))
    kept.consume_token(2**31 - 1)  # as if its lexer had too many states
    assert not known.mask(known.matcher(grammar, NO_LEAD)).is_empty
    assert not known.mask(state).is_empty


@pytest.mark.quick
def test_the_cache_drops_what_was_used_the_longest_ago() -> None:
    cache: GrammarCache[int] = GrammarCache(lambda value: value != 3)
    made: list[int] = []

    def get(value: int) -> None:
        def compile_grammar() -> int:
            made.append(value)
            return value

        assert cache.get(value, compile_grammar) == value

    for value in (*range(1, MAX_GRAMMARS + 1), 1, MAX_GRAMMARS + 1, 1, 2):
        get(value)
    assert made == [*range(1, MAX_GRAMMARS + 2), 2]
