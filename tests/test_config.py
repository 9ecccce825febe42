"""Options: defaults, checks and changes by copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from adafuse_llm import (
    AdaFuseConfig,
    InvalidOptionError,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("margin_threshold", 1.5, "less than or equal to 1"),
        ("margin_threshold", math.nan, ""),
        ("max_words", 0, "greater than or equal to 1"),
        ("branching_factor", 0, "greater than or equal to 1"),
        ("max_new_tokens", 0, "greater than or equal to 1"),
        ("stop", [""], "at least one character"),
        ("weights", [1.0, -1.0], "non-negative"),
        ("weights", [0.0, 0.0], "not all zero"),
        ("weights", {"a": math.inf}, "finite"),
        ("weights", "x", "number per member"),
        ("temperature", -0.5, "greater than or equal to 0"),
        ("temperature", math.inf, "finite"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("top_k", -2, "greater than or equal to 1"),
        ("seed", True, "number"),
        ("n", 129, "less than or equal to 128"),
        ("logprobs", "often", "boolean"),
        ("top_logprobs", 21, "less than or equal to 20"),
        ("chat_template_kwargs", "x", "dictionary"),
        ("use", (), "at least one member"),
    ],
)
def test_an_option_out_of_range_is_named_with_what_is_allowed_and_given(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        AdaFuseConfig(**{name: value})
    message = str(caught.value)
    assert name in message
    assert allowed in message
    given = [*value.values()] if isinstance(value, dict) else value
    assert repr(value) in message or any(repr(part) in message for part in given)
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)


def test_an_unknown_option_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidOptionError, match=r"'max_token'.*Did you mean 'max_new_tokens'"):
        AdaFuseConfig(max_token=5)  # type: ignore[call-arg]
    with pytest.raises(InvalidOptionError, match=r"'zzz'.*The options are: margin_threshold"):
        AdaFuseConfig(zzz=5)  # type: ignore[call-arg]
    with pytest.raises(InvalidOptionError, match=r"'strategy'.*with_strategy"):
        AdaFuseConfig(strategy="single")  # type: ignore[call-arg]
    with pytest.raises(InvalidOptionError, match="Did you mean 'margin_threshold'"):
        AdaFuseConfig().override({"margin_treshold": 0.5})


def test_none_and_zero_turn_sampling_off() -> None:
    assert AdaFuseConfig(temperature=0) == AdaFuseConfig(temperature=None) == AdaFuseConfig()
    assert AdaFuseConfig(top_k=-1) == AdaFuseConfig()
    assert AdaFuseConfig(top_p=None, top_k=0, n=None, top_logprobs=None) == AdaFuseConfig()


def test_options_are_frozen_and_changed_by_copy() -> None:
    config = AdaFuseConfig(max_words=2)
    with pytest.raises(Exception, match="frozen"):
        config.max_words = 3
    changed = config.override({"stop": "x", "weights": [1, 2]})
    assert (changed.max_words, changed.stop, changed.weights) == (2, ("x",), (1.0, 2.0))
    assert (config.stop, config.weights) == ((), None)
    assert AdaFuseConfig(stop=None).stop == ()
    assert AdaFuseConfig(stop=["a", "b"]).stop == ("a", "b")


def test_the_options_of_the_reference_are_the_options_of_the_engine() -> None:
    from tests.reference import Options

    assert vars(Options()) == AdaFuseConfig().model_dump(exclude={"use"})


@pytest.mark.parametrize(
    ("name", "highest"),
    [
        *(("max_words", 100), ("branching_factor", 100)),
        *(("max_word_tokens", 256), ("max_word_letters", 256)),
    ],
)
def test_options_that_need_memory_have_an_upper_bound(name: str, highest: int) -> None:
    options: dict[str, Any] = {name: highest}
    assert getattr(AdaFuseConfig(**options), name) == highest
    options[name] += 1
    with pytest.raises(InvalidOptionError, match=f"'{name}'.*less than or equal to {highest}"):
        AdaFuseConfig(**options)
    assert f"At most {highest}" in (AdaFuseConfig.model_fields[name].description or "")


@pytest.mark.parametrize("weights", [[1e308, 1e308], {"a": 1e13}, [math.nan, 1.0]])
def test_weights_have_an_upper_bound(weights: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"weights must be finite.*at most 1e\+12"):
        AdaFuseConfig(weights=weights)
    assert AdaFuseConfig(weights=[1e12, 0]).weights == (1e12, 0.0)


def nested(value: Any = "lol") -> Any:
    """Return lists in lists whose `repr` has a hundred thousand parts."""
    for _ in range(5):
        value = [value] * 10
    return value


@pytest.mark.parametrize(
    "options",
    [
        {"max_words": nested()},
        {"max_words": 10**5000},
        {"stop": {"x" * 10_000: nested()}},
        {"weights": nested()},
        {"x" * 10_000: 1},
    ],
)
def test_values_in_errors_are_short(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        AdaFuseConfig(**options)
    assert len(str(caught.value)) < 600


def test_a_schema_is_a_dict_json_text_or_a_pydantic_class() -> None:
    class Inner(BaseModel):
        value: int

    class Outer(BaseModel):
        inner: Inner
        more: dict[str, int]

    class Open(BaseModel, extra="allow"):
        value: int

    class Unwritable(BaseModel, arbitrary_types_allowed=True):
        value: Callable[[], int]

    def schema_of(given: Any) -> dict[str, Any]:
        schema = AdaFuseConfig(json_schema=given).json_schema
        assert schema is not None
        return schema

    schema = schema_of(Outer)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["properties"]["more"]["additionalProperties"] == {"type": "integer"}
    assert schema_of(Open)["additionalProperties"] is True
    assert schema_of('{"type": "object"}') == schema_of({"type": "object"}) == {"type": "object"}
    for wrong, said in (
        (Unwritable, "pydantic cannot write the schema of Unwritable"),
        (list[int], r"pydantic.TypeAdapter\(type\).json_schema\(\)"),
        ("{", "the text is not JSON"),
        (True, "a JSON schema must be a dict"),
        ({"const": "\ud800"}, "half a surrogate pair"),
        ({"const": {1}}, "cannot be written as JSON"),
    ):
        with pytest.raises(InvalidOptionError, match=said):
            AdaFuseConfig(json_schema=wrong)  # type: ignore[arg-type]


def test_choices_are_different_texts() -> None:
    assert AdaFuseConfig(choices=["yes", "no"]).choices == ("yes", "no")
    for wrong, said in (
        ("yes", "must be a list of texts"),
        (["yes", True], "put yes, no, true and false in quotes"),
        (["a", "a"], "must differ from each other"),
        ([], "one or more texts"),
        (["a", " "], "one or more texts"),
        (["\ud800"], "half a surrogate pair"),
    ):
        with pytest.raises(InvalidOptionError, match=said):
            AdaFuseConfig(choices=wrong)  # type: ignore[arg-type]


def test_at_most_one_option_sets_the_form() -> None:
    with pytest.raises(InvalidOptionError, match="got regex and choices"):
        AdaFuseConfig(regex="a", choices=["a"])
    config = AdaFuseConfig(regex="a", max_words=2)
    replaced = config.override({"choices": ["a"]})
    assert (replaced.regex, replaced.choices, replaced.max_words) == (None, ("a",), 2)
    assert config.override({"regex": None}).regex is None
