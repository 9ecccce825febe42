"""Grammars: masks against a check of every token, closing texts, and the limits of both."""

import random
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.errors import GrammarError
from adafuse_llm.text import grammar as grammars
from adafuse_llm.text.closing import MAX_SECONDS
from adafuse_llm.text.grammar import NO_LEAD, ONE_SPACE, Grammar
from adafuse_llm.tree import is_allowed
from tests.decoding.cases import FORMS
from tests.reference_grammar import Follower, Language, Lead, token_bytes
from tests.support.models import Recipe, backend, reference, tokenizer
from tests.support.schemas import is_valid, schemas, walk


def compiled(**form: Any) -> Grammar:
    grammar = Grammar.of(AdaFuseConfig(**form))
    assert grammar is not None
    return grammar


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


@settings(max_examples=20)
@given(schema=schemas(), seed=st.integers(0, 10**6))
def test_every_prefix_of_a_document_can_be_closed(schema: dict[str, Any], seed: int) -> None:
    grammar = compiled(json_schema=schema)
    whole = walk(grammar.text(), seed) or ""
    rng = random.Random(seed)
    for size in {0, len(whole), *(rng.randrange(len(whole) + 1) for _ in range(4))}:
        closing = grammar.text().closing(whole[:size])
        assert closing is not None
        assert is_valid(schema, whole[:size] + closing), whole[:size] + closing
    assert grammar.text().closing("nothing that is JSON") is None


# Closing texts and limits -----------------------------------------------------------------------

NO_TEXT = "no text of at most 10,000 bytes that fits the grammar was found"
TOO_LONG = f"{NO_TEXT}|too many states"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grammar": "start: a\na: a"}, NO_TEXT),
        ({"regex": r"[^\s\S]"}, NO_TEXT),
        ({"json_schema": {"$ref": "#"}}, NO_TEXT),
        ({"grammar": "#" * 1_000_001}, "limit is 1,000,000"),
        ({"grammar": 'start: a\na: "x" a'}, NO_TEXT),
        ({"regex": "a{20000}"}, NO_TEXT),
        ({"json_schema": {"type": "string", "minLength": 100_000}}, TOO_LONG),
        (
            {"json_schema": {"properties": {f"p{number}": {} for number in range(3_000)}}},
            "items; max is 2000",
        ),
    ],
)
def test_a_grammar_without_a_short_text_is_refused_soon(
    options: dict[str, Any], message: str
) -> None:
    config = AdaFuseConfig(**options)
    began = time.thread_time()
    with pytest.raises(GrammarError, match=message) as caught:
        Grammar.of(config)
    assert "<state>" not in str(caught.value)
    assert time.thread_time() - began < 2 * MAX_SECONDS


WORDY = {"enum": ["a value of many words that nobody would write without a reason", "b"]}
END_OR_MORE = {"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]}
CHAINS = {
    "type": "array",
    "minItems": 2,
    "items": {"$ref": "#/$defs/chain"},
    "$defs": {"chain": {"type": "object", "properties": {"a": END_OR_MORE}, "required": ["a"]}},
}


@pytest.mark.parametrize(
    ("form", "begun", "closing"),
    [
        ({"regex": "a{3,7}(bc)*d"}, "aa", "ad"),
        ({"regex": "a{3,7}(bc)*d"}, "aaaab", "cd"),
        ({"regex": '"([^"\\\\]|\\\\.)*"'}, '"x', '"'),
        ({"grammar": 'start: e\ne: e "+" n | n\nn: /[0-9]/ | "(" e ")"'}, "1+(2", ")"),
        ({"json_schema": {"enum": ["mill", "mint"]}}, '"min', 't"'),
        ({"regex": "[a-z]+"}, "A", None),
        ({"json_schema": {"type": "array", "minItems": 1, "items": WORDY}}, "", '["b"]'),
        ({"regex": "([a-z]+ ){300}"}, "", "a " * 300),
        ({"regex": "[a-z]*(foo|x;)"}, "", "x;"),
        ({"grammar": 'start: e\ne: "xa" e | "zzz"'}, "", "zzz"),
        ({"json_schema": {"type": "string", "pattern": "e"}}, '"x', ' e"'),
        ({"json_schema": {"type": "string", "pattern": r"^.*\.pdf$"}}, '"x', ' .pdf"'),
        ({"json_schema": {"type": "string", "pattern": r'(\d{2}-){2}("|é+x)'}}, '"', ' 00-00-\\""'),
        ({"grammar": 'start: /[a-z]{2}/  // "pattern": "\\d"'}, "", "aa"),
        ({"regex": r"[\s\S]*It is (a|[^\W\d]){3,}\."}, "So", "\nIt is aaa."),
        ({"json_schema": CHAINS}, "", '[{"a": null}, {"a": null}]'),
    ],
)
def test_a_closing_takes_the_short_way(
    form: dict[str, Any], begun: str, closing: str | None
) -> None:
    assert compiled(**form).text().closing(begun) == closing


HEAVY = (
    r"(x|y{20}[a-z]a\p{L}[a-z]+\p{L}{20}.*.a{1000}\w\p{L}{1,2}{3}a*?\w?"
    r".{1000}\w{1,9}\w{1000}\w+){2}"
)


def test_a_text_is_determined_if_no_other_can_follow() -> None:
    text = compiled(json_schema={"enum": ["mill", "mint"]}).text()
    text.commit('"mi')
    assert not text.determines(text.closing() or "")
    text.commit("l")
    assert text.determines('l"')
    assert not text.determines("l")


def test_searches_in_a_response_have_a_limit_together() -> None:
    text = compiled(regex=HEAVY).text()
    assert text.closing() == "xx"
    began = time.thread_time()
    for number in range(20):
        text.closing("y" * 20 + "ba" + "z" * (21 + number))
    assert time.thread_time() - began < 1  # without the limit, more than 20 seconds


def test_a_closing_that_is_known_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiled(regex="([a-z]+ ){3}")
    text = grammar.text()
    closings = [text.closing(prefix) for prefix in ("", "b", "b c")]
    monkeypatch.setattr(grammars, "found_closing", lambda *_: pytest.fail("it was searched"))
    assert [text.closing(prefix) for prefix in ("", "b", "b c")] == closings
    text.commit("b")
    assert text.closing() == closings[1]
    assert grammar.text().begun_with("").closing() == closings[0]


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
