"""Options: defaults, checks and changes by copy."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from adafuse_llm import AdaFuseConfig, InvalidOptionError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("margin_threshold", 1.5, "1.5"),
        ("margin_threshold", math.nan, "nan"),
        *((name, 0, "0") for name in ("max_words", "branching_factor", "max_new_tokens", "top_p")),
        *((name, 101, "101") for name in ("max_words", "branching_factor")),
        *((name, 257, "257") for name in ("max_word_tokens", "max_word_letters")),
        ("stop", [""], "''"),
        ("weights", [1.0, -1.0], "-1.0"),
        ("weights", [0.0, 0.0], "[0.0, 0.0]"),
        ("weights", {"a": 1e13}, "1000"),
        ("weights", [math.nan, 1], "nan"),
        ("weights", "x", "'x'"),
        ("temperature", math.inf, "inf"),
        ("top_p", 1.5, "1.5"),
        ("top_k", -2, "-2"),
        ("seed", True, "True"),
        ("n", 129, "129"),
        ("logprobs", "often", "'often'"),
        ("top_logprobs", 21, "21"),
        ("chat_template_kwargs", "x", "'x'"),
        ("use", (), "()"),
        ("choices", "yes", "'yes'"),
        ("choices", ["yes", True], "True"),
        ("choices", ["a", "a"], "['a', 'a']"),
        ("choices", [], "[]"),
        ("choices", ["a", " "], "['a', ' ']"),
        ("choices", ["\ud800"], "ud800"),
        ("repetition_penalty", 0, "0"),
        ("presence_penalty", 3, "3"),
        ("logit_bias", {5: -1}, "5"),
        ("logit_bias", {"a": 101}, "101"),
        ("logit_bias", dict.fromkeys(map(str, range(2000)), 1), "{"),
    ],
)
def test_an_option_that_cannot_be_used_is_named_with_what_was_given(
    name: str, value: Any, given: str
) -> None:
    with pytest.raises(InvalidOptionError, match=f"'{name}'") as caught:
        AdaFuseConfig(**{name: value})
    assert given in str(caught.value).rpartition("got ")[2]
    assert "\n" not in str(caught.value)


def test_an_unknown_option_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidOptionError, match=r"'max_token'.*Did you mean 'max_new_tokens'"):
        AdaFuseConfig(max_token=5)  # type: ignore[call-arg]
    with pytest.raises(InvalidOptionError, match=r"'zzz'.*The options are: margin_threshold"):
        AdaFuseConfig(zzz=5)  # type: ignore[call-arg]
    with pytest.raises(InvalidOptionError, match=r"'strategy'.*with_strategy"):
        AdaFuseConfig(strategy="single")  # type: ignore[call-arg]
    with pytest.raises(InvalidOptionError, match="'decisions' has no entry 'bias'"):
        AdaFuseConfig(decisions={"weights": {"a": 1}, "bias": 1})
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

    without = {"use", "calibration", "decisions"}
    assert vars(Options()) == AdaFuseConfig().model_dump(exclude=without)


def test_values_in_errors_are_short() -> None:
    value: Any = "lol"
    for _ in range(5):  # lists in lists whose `repr` has a hundred thousand parts
        value = [value] * 10
    for options in ({"weights": value}, {"stop": {"x" * 10_000: value}}, {"x" * 10_000: 1}):
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
        ({"const": "\ud800"}, "surrogates not allowed"),
        ({"const": {1}}, "not a valid JSON value"),
        ({"properties": {True: {}}}, "got True"),
    ):
        with pytest.raises(InvalidOptionError, match=said):
            AdaFuseConfig(json_schema=wrong)  # type: ignore[arg-type]


def test_at_most_one_option_sets_the_form() -> None:
    with pytest.raises(InvalidOptionError, match="got regex and choices"):
        AdaFuseConfig(regex="a", choices=["a"])
    config = AdaFuseConfig(regex="a", max_words=2)
    replaced = config.override({"choices": ["a"]})
    assert (replaced.regex, replaced.choices, replaced.max_words) == (None, ("a",), 2)
    assert config.override({"regex": None}).regex is None
