"""Responses of a given form: the engine against the reference, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from adafuse_llm.errors import InvalidOptionError
from tests.decoding import cases
from tests.decoding.cases import STARTS
from tests.reference import Options, Response, choose
from tests.support.compare import TOLERANCE, check
from tests.support.models import CHATTING, PAIR, TRIPLE, Recipe, engine, reference
from tests.support.schemas import PERSON, is_valid, schemas
from tests.support.sizes import sized

pytestmark = pytest.mark.usefixtures("untried")

MIXES = (
    PAIR,
    TRIPLE,
    CHATTING,
    (Recipe("qwen2", "gemma", seed=85), Recipe("llama", "legacy", seed=86)),
    (Recipe("mistral", "prefixed", seed=87), Recipe("llama", "unigram", seed=88)),
    (Recipe("llama", "sentencepiece", seed=89),),
)
FORMS = (*cases.FORMS, {"choices": ("yes", "no", "perhaps not", "caf\u00e9")})


@pytest.mark.sweep(5)
@pytest.mark.parametrize("start", STARTS, ids=["plain", "spaces", "newline", "messages"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_every_form_equals_the_reference(form: dict[str, Any], start: dict[str, Any]) -> None:
    number = FORMS.index(form) + STARTS.index(start)
    threshold = 0.9 if FORMS.index(form) % 2 else 0.2
    members = MIXES[number % len(MIXES)]
    check(members, **start, **form, margin_threshold=threshold, max_new_tokens=40)


LIMITED = (
    {"json_schema": PERSON},
    {"regex": "(ab|abcd)*(x y z)?e?"},
    {"regex": "[\u4e2d\u6587\U0001f600]{2,9}."},
    {"json_schema": {"type": "array", "items": {"type": "string"}}},
    {"json_schema": {"const": "the light is the light, and the night is long"}},
)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("start", STARTS[1:], ids=["spaces", "newline", "messages"])
@pytest.mark.parametrize("form", LIMITED, ids=range(len(LIMITED)))
def test_every_limit_from_the_lowest_one_equals_the_reference(
    form: dict[str, Any], start: dict[str, Any]
) -> None:
    language = Options(**form).language
    assert language is not None
    members = MIXES[LIMITED.index(form)]
    references = [reference(member) for member in members]
    prompt, messages = start.get("prompt"), start.get("messages")
    lowest = Response(references, prompt, messages, language).minimum()
    if lowest > 1:
        with pytest.raises(InvalidOptionError, match=rf"\b{lowest}\b"):
            engine(*members).generate(prompt, messages=messages, **form, max_new_tokens=lowest - 1)
    for limit in (*range(max(1, lowest), lowest + 3), lowest + 7):
        generation = check(
            members, **start, **form, margin_threshold=0.3, max_words=2, max_new_tokens=limit
        )
        assert language.holds(generation.text.encode())
        assert generation.usage.completion_tokens
        assert max(generation.usage.completion_tokens.values()) <= limit


def test_stop_sequences_act_where_the_response_may_end() -> None:
    form: dict[str, Any] = {"regex": "(ab?c? ?d?)*"}
    reasons = set()
    for stop in (("b",), ("a", " "), ("bc", "zz")):
        for start in STARTS:
            generation = check(PAIR, **start, **form, stop=stop, max_new_tokens=16)
            reasons.add(generation.finish_reason)
    assert reasons >= {"stop", "stop_sequence"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("extra", range(0, 12, 3))
def test_small_context_windows(extra: int) -> None:
    form: dict[str, Any] = {"regex": "[a-f]{3,20}( [a-f]{2,9}){0,4}"}
    prompt = "The ferry to"
    ids = reference(PAIR[0]).codec.encode_prompt(prompt)
    small = Recipe("llama", "bytelevel", seed=61, window=len(ids) + 3 + extra)
    for members in ((small,), (PAIR[1], small)):
        generation = check(members, prompt, **form, margin_threshold=0.3, max_new_tokens=40)
        language = Options(**form).language
        assert language is not None
        assert language.holds(generation.text.encode())


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.25, 1.5)])
def test_weights(weights: tuple[float, float]) -> None:
    for form in (FORMS[0], FORMS[-1]):
        check(PAIR, "The ferry to", **form, weights=weights, max_new_tokens=40)


def test_a_member_that_cannot_write_an_option_is_left_out_of_all() -> None:
    members = (Recipe("llama", "unknowns", seed=34), PAIR[0])
    choices = ("yes", "\u4e2d\u6587", "no")
    for start in STARTS:
        generation = check(members, **start, choices=choices)
        nlls = [candidate.nll for candidate in generation.rounds[0].candidates]
        assert all(set(nll) == {PAIR[0].name} for nll in nlls)


def test_choose_gives_the_sums_of_the_reference() -> None:
    choices = ("yes", "no", "perhaps not", "it is so")
    for start in STARTS:
        for members in MIXES:
            found = engine(*members).choose(**start, choices=choices)
            expected, sums = choose(
                [reference(member) for member in members],
                start.get("prompt"),
                Options(choices=choices),
                messages=start.get("messages"),
            )
            assert found.text == expected.text == choices[found.index]
            assert set(found.nll) == set(sums)
            for name, values in sums.items():
                assert found.nll[name] == pytest.approx(values, abs=TOLERANCE, rel=0)


@pytest.mark.sweep(1)
@settings(max_examples=sized(8, 600))
@given(
    schema=schemas(),
    start=st.sampled_from(STARTS),
    options=st.fixed_dictionaries(cases.WORDS),
    members=st.sampled_from(MIXES),
    extra=st.integers(0, 24),
)
def test_random_schemas_equal_the_reference(
    schema: dict[str, Any],
    start: dict[str, Any],
    options: dict[str, Any],
    members: tuple[Recipe, ...],
    extra: int,
) -> None:
    language = Options(json_schema=schema).language
    assert language is not None
    references = [reference(member) for member in members]
    response = Response(references, start.get("prompt"), start.get("messages"), language)
    limit = max(1, response.minimum()) + extra
    generation = check(members, **start, json_schema=schema, max_new_tokens=limit, **options)
    assert is_valid(schema, generation.text), generation.text
