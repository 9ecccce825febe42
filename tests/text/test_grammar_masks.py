"""Masks and closing texts of grammars, against a check of every token and every byte."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseConfig
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.errors import GrammarError
from adafuse_llm.text.grammar import NO_LEAD, ONE_SPACE, Grammar
from tests.reference_grammar import Follower, Language, Lead, token_bytes
from tests.support.models import Recipe, backend, engine, reference
from tests.support.schemas import is_valid, schemas, walk
from tests.support.tokenizers import known_tokenizer

KINDS = ("bytelevel", "sentencepiece", "unigram", "gemma", "legacy", "prefixed")
FORMS: tuple[dict[str, Any], ...] = (
    {
        "json_schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "tags": {"type": "array", "items": {"enum": ["caf\u00e9", "\u4e2d\u6587", 7]}},
                "n": {"type": ["number", "null"]},
            },
            "required": ["name", "n"],
        }
    },
    {"json_schema": {"type": "string", "format": "uuid"}},
    {"regex": "(the light|the night|\u4e2d\u6587+)( and [a-z ]{1,9})*\\.?"},
    {"regex": "\\s*\\S+\\s+\\w{2,}"},
    {"regex": "[^a-z\\n]{1,6}"},
    {"grammar": 'start: sum\nsum: sum "+" num | num\nnum: /[0-9]{1,3}/ | "(" sum ")"'},
    {"grammar": 'start: (WORD " "?)+\nWORD: /[A-Za-z\u00e9]+/'},
)
LEADS = (
    (Lead(0, free=False), NO_LEAD),
    (Lead(3, free=False), '"   " '),
    (Lead(0, free=True), ONE_SPACE),
)


@pytest.mark.parametrize(
    ("kind", "form"),
    [(kind, FORMS[(n + shift) % len(FORMS)]) for n, kind in enumerate(KINDS) for shift in (0, 3)],
    ids=range(2 * len(KINDS)),
)
def test_a_mask_holds_exactly_the_tokens_that_keep_a_text_possible(
    kind: str, form: dict[str, Any]
) -> None:
    """At random states, with every token tried byte by byte."""
    grammar = Grammar.of(AdaFuseConfig(**form))
    assert grammar is not None
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
                assert tokens_of(found.mask) == allowed, written
                assert found.is_forced == is_single, written
                assert found.is_empty == (not allowed)
                tokens = [token for token in allowed if token not in member.end_ids]
                if not tokens:
                    break
                token = rng.choice(tokens)
                assert state.consume_token(token)
                written += token_bytes(member.tokenizer)[token]


def tokens_of(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token for token in range(bits.bit_length()) if bits >> token & 1]


@pytest.mark.parametrize("kind", ["unknowns", "wordpiece", "slow"])
def test_members_whose_tokens_cannot_write_every_byte_are_refused(kind: str) -> None:
    if kind == "unknowns":
        member: Any = backend(Recipe("llama", kind, seed=1, layers=1))
    else:
        base = backend(Recipe("llama", "bytelevel", seed=1, layers=1))
        member = HuggingFaceBackend(base.model, known_tokenizer(kind), kind)
    from adafuse_llm import AdaFuseEngine

    with AdaFuseEngine([member]) as ensemble, pytest.raises(GrammarError, match=member.name):
        ensemble.generate("x", regex="[a-z\u4e2d]+")


SMALL: tuple[dict[str, Any], ...] = (
    {"regex": "a{3,7}(bc)*d"},
    {"regex": "(ab|abcd)*(x y z)?e?"},
    {"regex": '"([^"\\\\]|\\\\.)*"'},
    {"grammar": 'start: sum\nsum: sum "+" num | num\nnum: /[0-9]{1,3}/ | "(" sum ")"'},
)


@pytest.mark.parametrize("form", SMALL, ids=range(len(SMALL)))
def test_a_closing_text_is_as_short_as_the_shortest(form: dict[str, Any]) -> None:
    language = Language(**form)
    grammar = Grammar.of(AdaFuseConfig(**form))
    assert grammar is not None
    lengths = []
    for seed in range(8):
        whole = walk(grammar.text(), seed, 24)
        for size in range(len(whole or "")):
            response = (whole or "")[:size]
            closing = language.closing(response)
            assert language.holds((response + closing).encode())
            shortest = shortest_closing(language, response.encode())
            assert len(closing.encode()) <= shortest, (response, closing)
            lengths.append(shortest)
    assert max(lengths) > 1


def shortest_closing(language: Language, response: bytes) -> int:
    """The length of the shortest text that completes a response, by search over all bytes."""
    ends = [b""]
    for length in range(30):
        if any(language.holds(response + end) for end in ends):
            return length
        # one continuation of each kind: letters that allow the same next bytes are alike
        seen: dict[tuple[int, ...], bytes] = {}
        for end in ends:
            for byte in following(language, response + end):
                longer = end + bytes([byte])
                text = response + longer
                kind = (*following(language, text), language.holds(text), len(seen) < 400 and byte)
                seen.setdefault(kind, longer)
        ends = list(seen.values())
    raise AssertionError("no text completes the response")


def following(language: Language, text: bytes) -> list[int]:
    """The bytes that can follow `text`, from a mask of bytes."""
    mask = language.state(text).compute_bitmask()  # type: ignore[union-attr]
    return [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]


@settings(max_examples=30)
@given(schema=schemas(), seed=st.integers(0, 10**6))
def test_every_prefix_of_a_document_can_be_closed(schema: dict[str, Any], seed: int) -> None:
    grammar = Grammar.of(AdaFuseConfig(json_schema=schema))
    assert grammar is not None
    whole = walk(grammar.text(), seed) or ""
    rng = random.Random(seed)
    for size in {0, len(whole), *(rng.randrange(len(whole) + 1) for _ in range(4))}:
        closing = grammar.text().closing(whole[:size])
        assert closing is not None
        assert is_valid(schema, whole[:size] + closing), whole[:size] + closing
    assert grammar.text().closing("nothing that is JSON") is None


def test_the_engine_says_whether_it_can_enforce() -> None:
    assert engine(Recipe("llama", "bytelevel", seed=1, layers=1)).can_enforce
