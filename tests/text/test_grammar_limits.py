"""Grammars that no short text fits, and the time in which they are refused."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from adafuse_llm import AdaFuseConfig
from adafuse_llm.errors import GrammarError
from adafuse_llm.text import grammar as grammars

pytest.importorskip("llguidance")

from adafuse_llm.text.closing import MAX_SECONDS
from adafuse_llm.text.grammar import NO_LEAD, Grammar
from tests.support.models import Recipe, backend

NO_TEXT = "no text of at most 10,000 bytes that fits the grammar was found"
TOO_LONG = f"{NO_TEXT}|too many states"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grammar": "start: a\na: a"}, NO_TEXT),
        ({"grammar": "start: A\nA: /a/ & /b/"}, NO_TEXT),
        ({"regex": r"[^\s\S]"}, NO_TEXT),
        ({"json_schema": {"$ref": "#"}}, NO_TEXT),
        ({"grammar": "#" * 1_000_001}, "limit is 1,000,000"),
        ({"grammar": 'start: a\na: "x" a'}, NO_TEXT),
        ({"regex": "a{20000}"}, NO_TEXT),
        ({"json_schema": {"type": "string", "minLength": 100_000}}, TOO_LONG),
    ],
)
def test_a_grammar_without_a_short_text_is_refused_soon(
    options: dict[str, Any], message: str
) -> None:
    config = AdaFuseConfig(**options)
    began = time.thread_time()
    with pytest.raises(GrammarError, match=message):
        Grammar.of(config)
    assert time.thread_time() - began < 2 * MAX_SECONDS


def test_the_limits_of_llguidance_are_named() -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(3_000)}
    schema = {"type": "object", "properties": properties}
    with pytest.raises(GrammarError, match=r"items; max is 2000") as caught:
        Grammar.of(AdaFuseConfig(json_schema=schema))
    assert "<state>" not in str(caught.value)


WORDY = "a value of many words that nobody would write without a reason"
CHAIN = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]},
    },
    "required": ["v", "next"],
}


@pytest.mark.parametrize(
    ("form", "closing"),
    [
        (
            {"json_schema": {"type": "array", "minItems": 1, "items": {"enum": [WORDY, "b"]}}},
            '["b"]',
        ),
        ({"json_schema": {"anyOf": [{"const": WORDY}, {"const": "b"}]}}, '"b"'),
        ({"regex": f'"k": ("{WORDY}"|"z")'}, '"k": "z"'),
        ({"regex": "([a-z]+ ){300}"}, "a " * 300),
        ({"regex": r"[^.]{1,300}\."}, "\n."),
        ({"regex": "[a-z]*(foo|x;)"}, "x;"),
        ({"regex": "a*bbbb"}, "bbbb"),
        ({"grammar": 'start: e\ne: "xa" e | "zzz"'}, "zzz"),
        (
            {
                "json_schema": {
                    "type": "array",
                    "minItems": 2,
                    "items": {"$ref": "#/$defs/chain"},
                    "$defs": {"chain": CHAIN},
                }
            },
            '[{"v": 0, "next": null}, {"v": 0, "next": null}]',
        ),
    ],
)
def test_a_closing_takes_the_short_way(form: dict[str, Any], closing: str) -> None:
    grammar = Grammar.of(AdaFuseConfig(**form))
    assert grammar is not None
    assert grammar.text().closing() == closing


HEAVY = (
    r"(x|y{20}[a-z]a\p{L}[a-z]+\p{L}{20}.*.a{1000}\w\p{L}{1,2}{3}a*?\w?"
    r".{1000}\w{1,9}\w{1000}\w+){2}"
)


def test_a_text_is_determined_if_no_other_can_follow() -> None:
    grammar = Grammar.of(AdaFuseConfig(json_schema={"enum": ["mill", "mint"]}))
    assert grammar is not None
    text = grammar.text()
    text.commit('"mi')
    assert not text.determines(text.closing() or "")
    text.commit("l")
    assert text.determines('l"')
    assert not text.determines("l")


def test_searches_in_a_response_have_a_limit_together() -> None:
    grammar = Grammar.of(AdaFuseConfig(regex=HEAVY))
    assert grammar is not None
    text = grammar.text()
    assert text.closing() == "xx"
    began = time.thread_time()
    for number in range(20):
        text.closing("y" * 20 + "ba" + "z" * (21 + number))
    assert time.thread_time() - began < 1  # without the limit, more than 20 seconds


def test_a_closing_that_is_known_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar.of(AdaFuseConfig(regex="([a-z]+ ){3}"))
    assert grammar is not None
    text = grammar.text()
    closings = [text.closing(prefix) for prefix in ("", "b", "b c")]
    monkeypatch.setattr(grammars, "found_closing", lambda *_: pytest.fail("it was searched"))
    assert [text.closing(prefix) for prefix in ("", "b", "b c")] == closings
    text.commit("b")
    assert text.closing() == closings[1]
    assert grammar.text().begun_with("").closing() == closings[0]


def test_a_grammar_that_reached_a_limit_is_compiled_anew_for_the_next_request() -> None:
    config = AdaFuseConfig(regex="[a-d]+")
    vocabulary = backend(Recipe("llama", "bytelevel", seed=1)).grammar_vocabulary()
    grammar = Grammar.of(config)
    assert grammar is not None
    for kept in (grammar._start, vocabulary._start(grammar.option, grammar.lark())):
        kept.consume_token(2**31 - 1)  # as if its lexer had too many states
    with pytest.raises(GrammarError, match=re.escape(repr(vocabulary.name))):
        vocabulary.mask(kept)
    assert not vocabulary.mask(vocabulary.matcher(grammar, NO_LEAD)).is_empty
    again = Grammar.of(config)
    assert again is not None
    assert again.text().holds("ad")
    assert Grammar.of(config) is again
