"""Options, results, errors and the public names."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

import adafuse_llm
from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    AdaFuseError,
    Candidate,
    ContextWindowError,
    Generation,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
    MemberOutOfMemoryError,
)
from adafuse_llm.backends import Backend, FakeBackend
from tests.support.compare import approximately, as_data
from tests.support.models import Recipe, engine

# Options --------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert AdaFuseConfig().model_dump() == {
        "margin_threshold": 0.7,
        "max_words": 3,
        "branching_factor": 3,
        "max_word_tokens": 16,
        "max_new_tokens": 256,
        "stop": (),
        "weights": None,
        "use": None,
    }


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("margin_threshold", -0.1, "greater than or equal to 0"),
        ("margin_threshold", 1.5, "less than or equal to 1"),
        ("margin_threshold", "high", "number"),
        ("margin_threshold", math.nan, ""),
        ("max_words", 0, "greater than or equal to 1"),
        ("max_words", 1.5, "integer"),
        ("branching_factor", 0, "greater than or equal to 1"),
        ("branching_factor", -3, "greater than or equal to 1"),
        ("max_word_tokens", 0, "greater than or equal to 1"),
        ("max_new_tokens", 0, "greater than or equal to 1"),
        ("max_new_tokens", "many", "integer"),
        ("stop", [""], "at least one character"),
        ("stop", 5, "tuple"),
        ("weights", [1.0, -1.0], "non-negative"),
        ("weights", [0.0, 0.0], "not all zero"),
        ("weights", {"a": math.inf}, "finite"),
        ("weights", (), "not all zero"),
    ],
)
def test_an_error_names_the_option_the_allowed_range_and_the_value(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        AdaFuseConfig(**{name: value})
    message = str(caught.value)
    assert name in message
    assert allowed in message
    assert repr(value) in message or repr(value[0]) in message
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)


def test_the_error_for_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(InvalidOptionError, match=r"'max_token'.*Did you mean 'max_new_tokens'"):
        AdaFuseConfig(max_token=5)
    with pytest.raises(InvalidOptionError, match=r"'zzz'.*The options are: margin_threshold"):
        AdaFuseConfig(zzz=5)
    with pytest.raises(InvalidOptionError, match="Did you mean 'margin_threshold'"):
        AdaFuseConfig().override({"margin_treshold": 0.5})


@pytest.mark.parametrize("value", [0.7, 1, "warm", -1])
def test_a_temperature_other_than_zero_is_an_error(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"temperature.*0"):
        AdaFuseConfig(temperature=value)
    with pytest.raises(InvalidOptionError, match="temperature"):
        engine(Recipe()).generate("x", temperature=value)


def test_temperature_zero_has_no_effect() -> None:
    assert AdaFuseConfig(temperature=0) == AdaFuseConfig(temperature=None) == AdaFuseConfig()


def test_options_are_frozen_and_changed_by_copy() -> None:
    config = AdaFuseConfig(max_words=2)
    with pytest.raises(Exception, match="frozen"):
        config.max_words = 3  # type: ignore[misc]
    changed = config.override({"stop": "x", "weights": [1, 2]})
    assert (changed.max_words, changed.stop, changed.weights) == (2, ("x",), (1.0, 2.0))
    assert (config.stop, config.weights) == ((), None)
    assert AdaFuseConfig(stop=None).stop == ()
    assert AdaFuseConfig(stop=["a", "b"]).stop == ("a", "b")


def test_the_options_of_the_reference_are_the_options_of_the_engine() -> None:
    from tests.reference import Options

    assert vars(Options()) == AdaFuseConfig().model_dump(exclude={"use"})


# Requests -------------------------------------------------------------------------------------


def always(text: str) -> dict[str, float]:
    return {"<end>": 0.9, "a": 0.1}


@pytest.fixture
def pair() -> AdaFuseEngine:
    return AdaFuseEngine([FakeBackend("one", always), FakeBackend("two", always, (), 20)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "either a prompt or messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "   "}, "empty"),
        ({"prompt": 5}, "int"),
        ({"messages": []}, "empty"),
        ({"prompt": "x", "weights": [1.0]}, "weights.*2.*1"),
        ({"prompt": "x", "weights": {"one": 1.0}}, "weights.*missing: two"),
        ({"prompt": "x", "weights": {"one": 0, "two": 1}, "use": "one"}, "no weight.*one"),
        ({"prompt": "x", "use": ["one", "tow"]}, "no member 'tow'.*'two'"),
        ({"prompt": "x", "use": []}, "use.*at least 1"),
        ({"prompt": "x", "weights": {"one": 1.0, "tow": 1.0}}, "tow"),
        ({"prompt": "x", "max_words": 0}, "max_words"),
        ({"prompt": "x", "max_wrds": 1}, "Did you mean 'max_words'"),
    ],
)
def test_invalid_requests_are_errors_before_anything_is_computed(
    pair: AdaFuseEngine, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        pair.generate(**arguments)
    with pytest.raises(InvalidInputError, match=says):
        pair.stream(**arguments)
    assert all(getattr(member, "passes", 0) == 0 for member in pair.backends)


def test_the_error_for_a_long_prompt_names_member_window_and_tokens(
    pair: AdaFuseEngine,
) -> None:
    with pytest.raises(ContextWindowError, match=r"25 tokens.*'two'.*20"):
        pair.generate("x" * 25)
    with pytest.raises(ContextWindowError):
        pair.generate("x" * 20)
    assert pair.generate("x" * 19).finish_reason == "stop"
    assert pair.context_window == 20


def test_invalid_batches_are_errors(pair: AdaFuseEngine) -> None:
    for arguments in ({}, {"prompts": "x"}, {"prompts": ["x"], "messages": [[]]}):
        with pytest.raises(InvalidInputError):
            pair.generate_batch(**arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="empty"):
        pair.generate_batch(["x", ""])
    assert pair.generate_batch([]) == []
    assert all(getattr(member, "passes", 0) == 0 for member in pair.backends)


def test_an_engine_needs_members_with_different_names() -> None:
    with pytest.raises(InvalidInputError, match="at least one member"):
        AdaFuseEngine([])
    with pytest.raises(InvalidInputError, match="different names"):
        AdaFuseEngine([FakeBackend("one", always), FakeBackend("one", always)])
    with pytest.raises(InvalidOptionError, match="weights"):
        AdaFuseEngine([FakeBackend("one", always)], AdaFuseConfig(weights=(1.0, 1.0)))


def test_weights_by_name_and_by_order_are_the_same() -> None:
    members = (Recipe(seed=1), Recipe("gpt2", "sentencepiece", seed=2))
    names = [member.name for member in members]
    ensemble = engine(*members)
    by_order = ensemble.generate("The", max_new_tokens=8, weights=[0.2, 1.0])
    by_name = ensemble.generate("The", max_new_tokens=8, weights={names[1]: 1.0, names[0]: 0.2})
    assert as_data(by_order)["rounds"] == approximately(as_data(by_name)["rounds"])


def test_some_members_decode_like_an_engine_of_these_members() -> None:
    recipes = (Recipe(seed=1), Recipe("gpt2", "sentencepiece", seed=2), Recipe("gpt2", seed=3))
    names = [recipe.name for recipe in recipes]
    weights = dict(zip(names, (0.2, 1.0, 0.5), strict=True))
    ensemble = engine(*recipes)
    some = ensemble.generate("The", max_new_tokens=8, use=[names[2], names[0]], weights=weights)
    pair = engine(recipes[0], recipes[2]).generate("The", max_new_tokens=8, weights=[0.2, 0.5])
    assert set(some.usage.forward_passes) == {names[0], names[2]}
    assert as_data(some)["rounds"] == approximately(as_data(pair)["rounds"])


# Results --------------------------------------------------------------------------------------


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


def test_results_are_json_without_nan() -> None:
    """This also holds if a member cannot score a candidate."""

    def only_a(text: str) -> dict[str, float]:
        return {"a": 0.5, "b": 0.5, " ": 0.0} if text == ">" else {"<end>": 1.0}

    def only_c(text: str) -> dict[str, float]:
        return {"c": 0.6, "d": 0.4} if text == ">" else {"<end>": 1.0}

    with AdaFuseEngine([FakeBackend("one", only_a), FakeBackend("two", only_c)]) as ensemble:
        generation = ensemble.generate(">")
    data = json.loads(generation.model_dump_json(), parse_constant=refuse)
    assert data["text"] == generation.text == str(generation)
    assert data["rounds"][0]["candidates"][0]["nll"].keys() == {"one"}
    assert Generation.model_validate(data) == generation


def test_the_json_of_a_real_decode_has_no_nan_and_reads_back() -> None:
    generation = engine(Recipe(), Recipe("gpt2", "unknowns", seed=3)).generate(
        "Caf\u00e9 \U0001f600", max_new_tokens=12
    )
    data = json.loads(generation.model_dump_json(), parse_constant=refuse)
    assert Generation.model_validate(data) == generation
    assert data["usage"].keys() == {
        "prompt_tokens",
        "completion_tokens",
        "forward_passes",
        "tokens_processed",
        "cached_tokens",
    }
    assert all(
        set(counts) == set(engine(Recipe()).members) | {"gpt2-unknowns-3"}
        for counts in data["usage"].values()
    )
    assert all(r["elapsed"] >= 0 for r in data["rounds"])


def test_results_are_frozen() -> None:
    candidate = Candidate(text="a", stops=False, proposers=("one",), nll={}, score=None)
    with pytest.raises(Exception, match="frozen"):
        candidate.text = "b"  # type: ignore[misc]


# Errors ---------------------------------------------------------------------------------------


def test_every_error_has_our_base_class_and_a_standard_type() -> None:
    standard = {
        "InvalidInputError": ValueError,
        "LoadError": OSError,
        "MemberError": RuntimeError,
        "MemberOutOfMemoryError": MemoryError,
        "DecodingError": RuntimeError,
        "EngineClosedError": RuntimeError,
        "MissingDependencyError": ImportError,
        "ContextWindowError": ValueError,
        "CacheMemoryError": ValueError,
        "UnsupportedModelError": OSError,
        "InvalidOptionError": ValueError,
    }
    for name, kind in standard.items():
        error = getattr(adafuse_llm, name)
        assert issubclass(error, AdaFuseError)
        assert issubclass(error, kind)


def test_member_errors_survive_pickling() -> None:
    for kind in (MemberError, MemberOutOfMemoryError):
        error = pickle.loads(pickle.dumps(kind("wren", "it rained")))
        assert type(error) is kind
        assert (error.member, str(error)) == ("wren", "member 'wren' failed: it rained")


def test_no_scorable_candidate_is_an_error_not_a_silence() -> None:
    def impossible(text: str) -> dict[str, float]:
        return {"a": 0.0, "b": 0.0}

    ensemble = AdaFuseEngine([FakeBackend("one", impossible)])
    with ensemble, pytest.raises(adafuse_llm.DecodingError):
        ensemble.generate("x")


# Public names ---------------------------------------------------------------------------------


def test_importing_the_package_loads_no_framework() -> None:
    script = (
        "import sys, adafuse_llm;"
        "from adafuse_llm import AdaFuseConfig, AdaFuseEngine, MemberSpec;"
        "from adafuse_llm.backends import FakeBackend;from adafuse_llm.strategies import AdaFuse;"
        "AdaFuseEngine([FakeBackend('x', lambda t: {'<end>': 1.0, 'a': 0.0})]).generate('x');"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'accelerate', 'numpy')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_fakes_are_backends() -> None:
    assert isinstance(FakeBackend("x", always), Backend)
