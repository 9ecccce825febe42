"""Responses of a given form: valid on every mix of members, and equal to the reference."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from adafuse_llm.errors import MemberError
from tests.decoding import cases
from tests.decoding.cases import OTHERS, PREFIXED, STARTS
from tests.reference import Options, choose
from tests.support.compare import TOLERANCE, check
from tests.support.models import CHATTING, PAIR, TRIPLE, Recipe, backend, engine, reference
from tests.support.schemas import PERSON, is_valid, schemas
from tests.support.sizes import sized

pytestmark = pytest.mark.usefixtures("untried")

MIXES = (PAIR, TRIPLE, CHATTING, OTHERS, PREFIXED, (Recipe("llama", "sentencepiece", seed=89),))
ASCII = Recipe("llama", "ascii", seed=34)
CHOICES = ("yes", "no", "perhaps not", "caf\u00e9")
FORMS = (*cases.FORMS, {"choices": CHOICES})


def holds(form: dict[str, Any], text: str) -> bool:
    language = Options(**form).language
    return text in CHOICES if language is None else language.holds(text.encode())


@pytest.mark.quick
@pytest.mark.parametrize("number", range(len(FORMS)))
def test_every_form_equals_the_reference(number: int) -> None:
    form, start = FORMS[number], STARTS[number % len(STARTS)]
    members = MIXES[number % len(MIXES)]
    options: dict[str, Any] = {
        "margin_threshold": (0.2, 0.9)[number % 2],
        "weights": (0.25, 1.5) if number % 2 and len(members) == 2 else None,
        "max_new_tokens": 40,
    }
    assert holds(form, check(members, **start, **form, **options).text)


LIMITED = (
    {"json_schema": PERSON},
    {"regex": "(ab|abcd)*(x y z)?e?"},
    {"regex": "[\u4e2d\u6587\U0001f600]{2,9}."},
    {"json_schema": {"type": "array", "items": {"type": "string"}}},
    {"json_schema": {"const": "the light is the light, and the night is long"}},
)


@pytest.mark.parametrize("number", range(len(LIMITED)))
def test_a_limit_cuts_a_form_where_the_reference_does(number: int) -> None:
    form, start, members = LIMITED[number], STARTS[1 + number % 3], MIXES[number]
    language = Options(**form).language
    assert language is not None
    for limit in (1, 2, 5, 11, 30):
        generation = check(
            members, **start, **form, margin_threshold=0.3, max_words=2, max_new_tokens=limit
        )
        assert max(generation.usage.completion_tokens.values()) <= limit
        if generation.finish_reason == "length":
            assert language.begins(generation.text.encode())
            assert f"the limit of {limit} token" in generation.cut_by
        else:
            assert holds(form, generation.text)
            assert generation.cut_by == ""


def test_stop_sequences_act_where_the_response_may_end() -> None:
    form: dict[str, Any] = {"regex": "(ab?c? ?d?)*"}
    reasons = {
        check(PAIR, **start, **form, stop=stop, max_new_tokens=16).finish_reason
        for stop, start in zip((("b",), ("a", " "), ("bc", "zz")), STARTS, strict=False)
    }
    assert reasons >= {"stop", "stop_sequence"}


@pytest.mark.quick
@pytest.mark.parametrize("extra", [0, 6])
def test_windows_that_end_soon_after_the_prompt(extra: int) -> None:
    form: dict[str, Any] = {"regex": "[a-f]{3,20}( [a-f]{2,9}){0,4}"}
    prompt = "The ferry to"
    ids = reference(PAIR[0]).codec.encode_prompt(prompt)
    small = Recipe("llama", "bytelevel", seed=61, window=len(ids) + 3 + extra)
    for members in ((small,), (PAIR[1], small)):
        generation = check(members, prompt, **form, margin_threshold=0.3, max_new_tokens=40)
        assert repr(members[-1].name) in generation.cut_by or holds(form, generation.text)


def test_no_part_of_a_character_is_committed_where_a_window_ends() -> None:
    recipe = Recipe("gpt2", "sentencepiece", seed=32, end_bias=-9.0)
    used = len(backend(recipe).codec.encode_prompt(prompt := "The ferry to Orrin leaves at nine."))
    small = replace(recipe, window=used + 7)
    generation = check((small,), prompt, regex="[\u4e2d\u6587\ufffd]{1,9}")
    assert generation.text == ""
    assert small.name in generation.cut_by


@pytest.mark.parametrize("members", [(ASCII,), (PAIR[0], ASCII)])
def test_a_member_without_a_token_that_the_grammar_requires_is_named(
    members: tuple[Recipe, ...],
) -> None:
    with pytest.raises(MemberError, match=f"{ASCII.name}.*'ab'"):
        engine(*members).generate("The ferry to", regex="ab\u4e2d[a-z]")


def test_a_member_that_cannot_write_what_another_one_wrote_is_named() -> None:
    members = engine(PAIR[0], ASCII)
    with pytest.raises(MemberError, match=f"{ASCII.name}.*cannot write '中"):
        members.generate("I", regex="((中|a) ){3}b", weights=(5, 0.1))


def test_a_text_that_a_member_normalizes_goes_on_as_the_grammar_requires() -> None:
    members = (PAIR[0], Recipe("qwen2", "composed", seed=36))
    generation = check(members, **STARTS[1], regex="(e\u0301 |a){4,9}b", max_new_tokens=60)
    assert generation.text.startswith("e\u0301 a")


def test_drafts_under_a_grammar_save_passes() -> None:
    options: dict[str, Any] = {"regex": "( the light| the lamp){12}", "max_new_tokens": 90}
    passes, plain = (
        engine(PAIR[0], drafting=drafting).generate("The ferry to", **options).usage.forward_passes
        for drafting in (True, False)
    )
    assert sum(passes.values()) < 0.9 * sum(plain.values())


def test_a_member_that_cannot_write_an_option_is_left_out_of_all() -> None:
    members = (Recipe("llama", "unknowns", seed=34), PAIR[0])
    generation = check(members, **STARTS[1], choices=("yes", "\u4e2d\u6587", "no"))
    for candidate in generation.rounds[0].candidates:
        assert set(candidate.nll) == {PAIR[0].name}


@pytest.mark.quick
@pytest.mark.parametrize("number", range(len(STARTS)))
def test_choose_gives_the_sums_of_the_reference(number: int) -> None:
    start, members = STARTS[number], MIXES[number + 1]
    found = engine(*members).choose(**start, choices=CHOICES)
    expected, sums = choose(
        [reference(member) for member in members],
        start.get("prompt"),
        Options(choices=CHOICES),
        messages=start.get("messages"),
    )
    assert found.text == expected.text == CHOICES[found.index]
    assert set(found.nll) == set(sums)
    for name, values in sums.items():
        assert found.nll[name] == pytest.approx(values, abs=TOLERANCE, rel=0)


@pytest.mark.sweep(1)
@settings(max_examples=sized(12, 1000))
@given(
    schema=schemas(),
    start=st.sampled_from(STARTS),
    options=st.fixed_dictionaries(cases.WORDS),
    members=st.sampled_from(MIXES),
    limit=st.integers(1, 80),
)
def test_random_schemas_equal_the_reference(
    schema: dict[str, Any],
    start: dict[str, Any],
    options: dict[str, Any],
    members: tuple[Recipe, ...],
    limit: int,
) -> None:
    generation = check(members, **start, json_schema=schema, max_new_tokens=limit, **options)
    if generation.finish_reason != "length":
        assert is_valid(schema, generation.text), generation.text
