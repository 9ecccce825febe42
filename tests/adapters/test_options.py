"""Options of calls, under the names that frameworks and providers use."""

from __future__ import annotations

from dataclasses import fields

import pytest

from adafuse_llm import InvalidOptionError, MemberSpec
from adafuse_llm.adapters.options import (
    MEMBER_SETTINGS,
    REFUSED,
    check_option_names,
)

pytestmark = pytest.mark.quick


def test_options_have_the_names_that_frameworks_use():
    assert check_option_names({}) == {}
    assert check_option_names({"max_tokens": 5, "stop": "x", "temperature": 0}) == {
        "max_new_tokens": 5,
        "stop": "x",
        "temperature": 0,
    }
    given = {"max_completion_tokens": 5, "max_new_tokens": 5, "stop": ["x"], "max_words": None}
    assert check_option_names(given) == {"max_new_tokens": 5, "stop": ["x"]}
    assert check_option_names({"stop": None, "weights": None, "use": None}) == {
        "weights": None,
        "use": None,
    }
    assert check_option_names({"tools": None, "max_tokens": None}, extra=["tools"]) == {
        "tools": None
    }


def test_options_that_are_none():
    with pytest.raises(InvalidOptionError, match=r"'max_word'\. Did you mean 'max_words'\?$"):
        check_option_names({"max_word": 3})
    with pytest.raises(InvalidOptionError, match=r"Did you mean 'max_tokens'"):
        check_option_names({"max_token": 3})
    with pytest.raises(InvalidOptionError, match=r"'tool'.*Did you mean 'tools'\?$"):
        check_option_names({"tool": 3}, extra=["tools"])
    with pytest.raises(InvalidOptionError, match="max_tokens=5 and max_new_tokens=6"):
        check_option_names({"max_tokens": 5, "max_new_tokens": 6})


def test_a_strategy_belongs_to_an_engine():
    with pytest.raises(InvalidOptionError) as caught:
        check_option_names({"strategy": "single", "unsupported": "warn"}, extra=["unsupported"])
    assert "engine.with_strategy('single')" in str(caught.value)
    assert "One member alone needs no strategy: use=['name']." in str(caught.value)


@pytest.mark.parametrize(
    ("keyword", "settings"),
    [
        ("n_ctx", "'path': ..., 'context': ..."),
        ("model_path", "'path': ..."),
    ],
)
def test_an_unknown_option_can_be_a_setting_of_a_member(keyword, settings):
    with pytest.raises(InvalidOptionError) as caught:
        check_option_names({keyword: 1})
    advice = f"It is a setting of a member: members=[{{{settings}}}]."
    assert str(caught.value) == f"unknown option {keyword!r}. {advice}"
    assert {*MEMBER_SETTINGS.values()} <= {each.name for each in fields(MemberSpec)}


@pytest.mark.parametrize(
    ("keyword", "value", "why"),
    [
        ("tfs_z", 0.5, "unsupported"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("suppress_tokens", [5], "logit_bias"),
        ("reasoning_effort", "low", "chat_template_kwargs"),
        ("format", "json", "json_schema"),
    ],
)
def test_an_option_of_another_provider_is_refused_by_name_or_dropped(keyword, value, why):
    given = {keyword: value, "max_tokens": 5}
    with pytest.raises(InvalidOptionError, match=f"^option '{keyword}' .*{why}"):
        check_option_names(given)
    warnings: list[str] = []
    kept = check_option_names(given, unsupported="warn", warn=warnings.append)
    assert kept == {"max_new_tokens": 5}
    assert len(warnings) == 1
    assert warnings[0].startswith(f"option {keyword!r} ")
    assert warnings[0].endswith("; it is dropped")


@pytest.mark.parametrize("unsupported", ["error", "warn"])
def test_a_neutral_value_is_dropped_without_a_warning(unsupported):
    neutral = {name: value for name, each in REFUSED.items() for value in each.neutral}
    neutral |= {
        "typical_p": 1.0,
        "suppress_tokens": [],
        "extra_body": None,
        "api_key": "x",
        "base_url": "",
    }
    assert {"num_beams", "typical_p", "repeat_penalty"} <= {*neutral}
    warnings: list[str] = []
    assert not check_option_names(neutral, unsupported=unsupported, warn=warnings.append)
    assert not warnings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"frequency_penalties": 1}, "Did you mean 'frequency_penalty'"),
        ({"max_word": 1}, "'max_words'"),
        ({"model_name": "gpt-4o"}, "'model_name' does not exist here: pass members="),
        ({"base_url": "http://a"}, "'base_url' does not exist here: .*engine=RemoteEngine"),
        ({"top_k": 2, "num_return_sequences": 2, "n": 3}, "are the same option"),
    ],
)
def test_a_typo_a_model_or_a_server_is_never_dropped(given, message):
    for unsupported in ("error", "warn"):
        with pytest.raises(InvalidOptionError, match=message):
            check_option_names(given, unsupported=unsupported, warn=pytest.fail)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"do_sample": False}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.0}, {"temperature": 0}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": None, "temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": True}, "do_sample=True needs a temperature: pass temperature=1"),
        ({"do_sample": True, "temperature": 0}, "do_sample=True contradicts temperature=0;"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample=False contradicts temperature=0.5;"),
        ({"do_sample": "no"}, "'do_sample' must be True or False; got 'no'"),
    ],
)
def test_do_sample_becomes_a_temperature(given, expected):
    if isinstance(expected, dict):
        assert check_option_names(given) == expected
        return
    with pytest.raises(InvalidOptionError, match=expected):
        check_option_names(given, unsupported="warn", warn=pytest.fail)
