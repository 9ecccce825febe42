"""Options of calls, under the names that frameworks and providers use."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest

from adafuse_llm import AdaFuseConfig, InvalidOptionError, MemberSpec
from adafuse_llm.adapters.options import (
    ALIASES,
    CHOOSES_MODELS,
    MEMBER_SETTINGS,
    NO_EFFECT,
    REFUSED,
    check_option_names,
)
from tests.support.scripted import scripted_engine

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
        ("processes", "'path': ..., 'process': ..."),
        ("model_path", "'path': ..."),
        ("ray", "'path': ..., 'ray': ..."),
    ],
)
def test_an_unknown_option_can_be_a_setting_of_a_member(keyword, settings):
    with pytest.raises(InvalidOptionError) as caught:
        check_option_names({keyword: 1})
    advice = f"It is a setting of a member: members=[{{{settings}}}]."
    assert str(caught.value) == f"unknown option {keyword!r}. {advice}"
    assert {*MEMBER_SETTINGS.values()} <= {each.name for each in fields(MemberSpec)}


@pytest.mark.parametrize(
    ("keyword", "setting"),
    [("num_ctx", "context"), ("num_gpu", "gpu_layers"), ("num_thread", "threads")],
)
def test_options_of_ollama_name_the_settings_of_gguf_members(keyword, setting):
    with pytest.raises(InvalidOptionError, match=rf"GGUF member.*MemberSpec\(.*{setting}="):
        check_option_names({keyword: 5})


def test_checked_options_are_the_engines():
    with scripted_engine(lambda _: "one two three four") as engine:
        messages = [{"role": "user", "content": "?"}]
        options = check_option_names({"max_tokens": 60, "stop": "three", "temperature": None})
        assert engine.generate(messages=messages, **options).text == "one two "
        with pytest.raises(InvalidOptionError, match="temperature"):
            engine.generate(messages=messages, **check_option_names({"temperature": -1}))


def test_an_unknown_option_names_at_most_three_options_like_it():
    fields = [
        "max_retries",
        "max_token_count",
        "stream",
        "streaming",
        *(f"x{i}" for i in range(30)),
    ]
    for keyword in ("max_token", "max_word_token", "streamin"):
        with pytest.raises(InvalidOptionError) as caught:
            check_option_names({keyword: 3}, extra=fields)
        assert 1 <= str(caught.value).count("'") // 2 - 1 <= 3
    with pytest.raises(InvalidOptionError, match=r"'streaming' or 'stream'\?$"):
        check_option_names({"streamin": 3}, extra=fields)
    with pytest.raises(InvalidOptionError) as caught:
        check_option_names({"best_of": 2}, extra=fields)
    assert "Did you mean" not in str(caught.value)
    assert "x7" not in str(caught.value)
    assert "max_words" in str(caught.value)


@pytest.mark.parametrize(
    ("keyword", "value", "why"),
    [
        ("tfs_z", 0.5, "is not supported; leave it out"),
        ("repeat_penalty", 1.1, "pass repetition_penalty; leave it out"),
        ("suppress_tokens", [5], "pass logit_bias={text: -100}; leave it out"),
        ("http_client", object(), "does not connect to a server; leave it out"),
        ("generate_kwargs", {"top_k": 5}, "each option in it as a keyword argument"),
        ("reasoning_effort", "low", "chat_template_kwargs"),
        ("format", "json", "pass json_schema"),
    ],
)
def test_an_option_of_another_provider_is_refused_by_name_or_dropped(keyword, value, why):
    given = {keyword: value, "max_tokens": 5}
    with pytest.raises(InvalidOptionError, match=f"^option '{keyword}' .*{why}") as caught:
        check_option_names(given)
    assert str(caught.value).endswith("or pass unsupported='warn' to drop it")
    assert "\n" not in str(caught.value)
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


def test_an_option_of_the_class_itself_is_never_refused():
    given = {"timeout": 5, "num_beams": 2, "model": "a", "api_key": "x", "do_sample": True}
    assert check_option_names(given, extra=[*given]) == given


def test_without_a_function_for_warnings_the_logger_warns(caplog):
    with caplog.at_level(logging.WARNING, "adafuse_llm"):
        assert check_option_names({"tfs_z": 0.1}, unsupported="warn") == {}
    assert caplog.messages == ["option 'tfs_z' is not supported; it is dropped"]


def test_an_unknown_way_to_treat_unsupported_options_is_refused():
    with pytest.raises(InvalidOptionError, match="'error' or 'warn'; got 'ignore'"):
        check_option_names({}, unsupported="ignore")  # type: ignore[arg-type]


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


def test_every_name_has_one_meaning():
    names = [*AdaFuseConfig.model_fields, *ALIASES, *CHOOSES_MODELS, *NO_EFFECT, *REFUSED]
    assert len(names) == len({*names})
    assert {*ALIASES.values()} <= {*AdaFuseConfig.model_fields}
