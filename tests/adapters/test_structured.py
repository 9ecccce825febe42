"""Structured output."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_llm import InvalidInputError
from adafuse_llm.adapters.structured import find_json, schema_instructions

pytestmark = pytest.mark.quick

OBJECT = '{"a": [1, {"b": "}```"}], "c": "</think> \\" ["}'
VALUE = json.loads(OBJECT)


@pytest.mark.parametrize(
    "text",
    [
        OBJECT,
        f"\n {OBJECT}\n",
        f"```json\n{OBJECT}\n```",
        f"```\n{OBJECT}```",
        f"As asked [1]:\n\n```json\n{OBJECT}\n```\nThat is {{all}} I know [2].",
        f"Sure! {OBJECT} Hope that helps, it's (not) {{much}}.",
        f"The set {{1}} and {OBJECT}",
        f"{OBJECT} {{}}",
    ],
)
def test_json_is_found_whatever_stands_around_it(text):
    assert find_json(text) == VALUE


@pytest.mark.parametrize(
    ("text", "value"),
    [("42", 42), ('"text"', "text"), ("[]", []), ('It is:\n[{"a": 1}]', [{"a": 1}])],
)
def test_values_may_be_of_any_kind(text, value):
    assert find_json(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42 is it",
        '```json\n{"a": [1, 2], "b": "',
        '{"a": "x}',
        'So: {"a": 1,, "b": [1, 2]}',
        "So: {'a': [1, 2]}",
        '{"a": NaN}',
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_no_part_is_taken_for_the_whole(text):
    with pytest.raises(ValueError, match="JSON"):
        find_json(text)


def test_a_draft_is_not_taken_for_the_value_that_a_limit_cuts():
    draft = 'Draft: {"a": "long"}. Final: {"a'
    assert find_json(draft) == {"a": "long"}
    with pytest.raises(ValueError, match="JSON"):
        find_json(draft, is_cut=True)
    assert find_json('{"a": "long"} I hope {this} hel', is_cut=True) == {"a": "long"}


JSON = st.recursive(
    st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=6), JSON), st.sampled_from(["So: ", "", "```json\n"]))
def test_any_object_is_found_and_no_beginning_of_it(value, before):
    text = json.dumps(value)
    assert find_json(before + text + "\n```") == value
    with pytest.raises(ValueError, match="JSON"):
        find_json(before + text[:-1])


def test_what_members_are_told():
    schema = {"type": "object", "title": "Größe", "properties": {"a": {"type": "integer"}}}
    text = schema_instructions(schema)
    assert find_json(text) == schema
    assert "Größe" in text
    assert ": " not in text.splitlines()[-1]
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        schema_instructions({"default": object()})
