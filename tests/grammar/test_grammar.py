"""Grammars: masks against a check of every token, and limits."""

import random
import re
from typing import Any

import pytest

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.errors import GrammarError
from adafuse_llm.grammar.grammar import NO_LEAD, ONE_SPACE, Grammar
from adafuse_llm.tree.tokens import is_allowed
from tests.decoding.cases import FORMS
from tests.reference_grammar import Follower, Language, Lead, token_bytes
from tests.support.models import Recipe, backend, reference, tokenizer


def compiled(**form: Any) -> Grammar:
    grammar = Grammar.of(AdaFuseConfig(**form))
    assert grammar is not None
    return grammar


def test_long_forced_text_is_read_in_pieces() -> None:
    """Because all copies of a state share a lexer, which fails after some 25,000 new bytes."""
    engine = AdaFuseEngine([backend(Recipe("llama", "bytelevel", seed=1, layers=1))])
    generation = engine.generate("x", json_schema={"const": "word " * 9000})
    assert generation.rounds[0].forced
    assert generation.text.startswith('"word word')


# Masks ------------------------------------------------------------------------------------------

KINDS = ("bytelevel", "sentencepiece", "unigram", "gemma", "legacy", "prefixed")
LEADS = (
    (Lead(0, free=False), NO_LEAD),
    (Lead(3, free=False), '"   " '),
    (Lead(0, free=True), ONE_SPACE),
)


@pytest.mark.parametrize(
    ("kind", "form"), [(kind, FORMS[n % len(FORMS)]) for n, kind in enumerate(KINDS)], ids=KINDS
)
def test_a_mask_holds_exactly_the_tokens_that_keep_a_text_possible(
    kind: str, form: dict[str, Any]
) -> None:
    """At random states, with every token tried byte by byte."""
    grammar = compiled(**form)
    recipe = Recipe("llama", kind, seed=1, layers=1)
    member, language = reference(recipe), Language(**form)
    vocabulary = backend(recipe).grammar_vocabulary()
    rng = random.Random(f"{kind} {form}")
    for lead, prefix in LEADS:
        if lead.free and grammar.begins_with_space:
            continue
        follower = Follower(language, member, lead)
        for _ in range(2):
            state, written = vocabulary.matcher(grammar, prefix), b""
            for _ in range(8):
                allowed, is_single = follower.allowed(written)
                found = vocabulary.mask(state.deep_copy())
                if found is None:
                    assert not allowed, written
                    break
                permitted = [t for t in range(8 * len(found.mask)) if is_allowed(found.mask, t)]
                assert permitted == allowed, written
                assert found.is_forced == is_single, written
                tokens = [token for token in allowed if token not in member.end_ids]
                if not tokens:
                    break
                token = rng.choice(tokens)
                assert state.consume_token(token)
                written += token_bytes(member.tokenizer)[token]


@pytest.mark.parametrize("kind", ["unknowns", "wordpiece", "slow"])
def test_members_whose_tokens_cannot_write_every_byte_are_refused(kind: str) -> None:
    base = backend(Recipe("llama", "bytelevel", seed=1, layers=1))
    member = HuggingFaceBackend(base.model, tokenizer(kind), kind)
    with AdaFuseEngine([member]) as ensemble, pytest.raises(GrammarError, match=kind):
        ensemble.generate("x", regex="[a-z\u4e2d]+")


# Limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grammar": "start: a\na: a"}, "no text fits"),
        ({"regex": r"[^\s\S]"}, "no text fits"),
        ({"json_schema": {"$ref": "#"}}, "no text fits"),
    ],
)
def test_a_grammar_without_a_text_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiled(**options)


def test_a_grammar_that_exceeds_a_limit_while_text_is_read_is_an_error() -> None:
    many = "start: " + " | ".join(f'"x{number}"' for number in range(5_000))
    member = backend(Recipe("llama", "bytelevel", seed=1, layers=1))
    with pytest.raises(GrammarError, match="too complex"):
        compiled(grammar=many).text().holds("x1")
    with AdaFuseEngine([member]) as engine, pytest.raises(GrammarError, match="too complex"):
        engine.generate(messages=[{"role": "user", "content": "x"}], grammar=many)


def test_a_response_cannot_begin_with_characters_that_a_member_has_no_tokens_for() -> None:
    vocabulary = backend(Recipe("llama", "ascii", seed=34)).grammar_vocabulary()
    with pytest.raises(GrammarError, match=f"{vocabulary.name}.*中"):
        vocabulary.matcher(compiled(regex="a[中b]+"), NO_LEAD, "a中b")


def test_a_grammar_that_reached_a_limit_is_compiled_anew_for_the_next_request() -> None:
    vocabulary = backend(Recipe("llama", "bytelevel", seed=1)).grammar_vocabulary()
    grammar = compiled(regex="[a-d]+")
    for kept in (grammar._start, vocabulary._start(grammar.option, grammar.lark())):
        kept.consume_token(2**31 - 1)  # as if its lexer had too many states
    with pytest.raises(GrammarError, match=re.escape(repr(vocabulary.name))):
        vocabulary.mask(kept)
    assert vocabulary.mask(vocabulary.matcher(grammar, NO_LEAD)) is not None
    again = compiled(regex="[a-d]+")
    assert again.text().holds("ad")
    assert compiled(regex="[a-d]+") is again
