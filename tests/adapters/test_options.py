"""Options of calls, under the names that frameworks and providers use."""

import pytest

from adafuse_llm import InvalidOptionError
from adafuse_llm.adapters.options import check_option_names

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
    nullable = {"weights": None, "use": None}
    assert check_option_names({"stop": None, "service_tier": None, **nullable}) == nullable
    assert check_option_names({"tools": None}, extra=["tools"]) == {"tools": None}
    assert check_option_names({"extra_headers": {"a": "b"}, "user": "me"}) == {}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_word": 3}, "'max_words'"),
        ({"max_token": 3}, "'max_tokens'"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "^max_tokens=5 and max_new_tokens=6 are"),
        ({"strategy": "single"}, "with_strategy"),
        ({"gpu_layers": 1}, "members="),
        ({"max_tokenz": 1}, r"mean 'max_tokens' or 'max_new_tokens' or 'max_word_tokens'\?$"),
        ({"model_name": "gpt-4o"}, "members="),
        ({"base_url": "http://a"}, "RemoteEngine"),
        ({"num_beams": 2}, "num_beams"),
        ({"suppress_tokens": [5]}, "logit_bias"),
    ],
)
def test_an_option_that_does_not_exist_is_an_error_that_names_what_does(given, named):
    with pytest.raises(InvalidOptionError, match=named):
        check_option_names(given, extra=["tools"])
