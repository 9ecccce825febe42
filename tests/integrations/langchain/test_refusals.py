"""What the models refuse: the type of the error, and the option or part that it names."""

import pickle
from typing import Any

import pytest
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelInvalidRequestError,
    ModelTimeoutError,
)

from adafuse_llm import (
    ContextWindowError,
    InvalidInputError,
    InvalidOptionError,
    RequestTimeoutError,
)

pytestmark = pytest.mark.quick

MULTIPLY = {"type": "function", "function": {"name": "multiply", "parameters": {}}}

WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_word": 2}, "'max_words'"),
    ({"n": 2}, "'n'"),
    ({"round_detail": "some"}, "'round_detail'"),
    ({"use": "quil"}, "'quill'"),
    ({"use": "ink", "model": "quill"}, "same option"),
    ({"timeout": 0}, "'timeout'"),
]


@pytest.mark.parametrize(("options", "named"), WRONG_OPTIONS, ids=str)
def test_a_wrong_option_is_named_in_one_line(kind, obliging, options, named):
    model = kind(engine=obliging)
    for refused in (
        lambda: kind(engine=obliging, **options),
        lambda: model.invoke("Hi", **options),
        lambda: next(model.stream("Hi", **options)),
    ):
        with pytest.raises(InvalidOptionError, match=named) as caught:
            refused()
        assert "\n" not in str(caught.value)


def test_members_and_texts_that_are_missing_are_asked_for(kind, obliging, monkeypatch):
    with pytest.raises(InvalidInputError, match="members="):
        kind(model="Qwen/Qwen3-8B")
    monkeypatch.setenv("ADAFUSE_MEMBERS", "a/b")
    with pytest.raises(InvalidInputError, match="members is empty"):
        kind(members=iter([]))
    with pytest.raises(InvalidInputError, match="text"):
        kind(engine=obliging).invoke("")
    with pytest.raises(InvalidInputError, match="engine= cannot be combined with dtype"):
        kind(engine=obliging, dtype="bfloat16")
    with pytest.raises(InvalidOptionError, match="'temperature'"):
        kind(engine=obliging).temperature = "hot"


@pytest.mark.parametrize(
    ("tool", "options", "named"),
    [
        ({"type": "web_search"}, {}, "web_search"),
        (MULTIPLY, {"tool_choice": "multiple"}, "'multiply'"),
        (MULTIPLY, {"enforce": "yes"}, "enforce"),
        (MULTIPLY, {"regex": "a"}, "regex"),
    ],
    ids=str,
)
def test_tools_and_choices_that_cannot_be_read(chat, tool, options, named):
    with pytest.raises(InvalidInputError, match=named):
        chat.bind_tools([tool], **options).invoke("Hi")
    with pytest.raises(InvalidInputError, match=named):
        chat.invoke("Hi", tools=[tool], **options)


def test_unknown_methods_and_missing_schemas(chat):
    with pytest.raises(InvalidInputError, match="json_schema"):
        chat.with_structured_output({"title": "City"}, method="grammar")
    with pytest.raises(InvalidInputError, match="schema"):
        chat.with_structured_output(None)


async def test_prompts_that_are_too_long_and_calls_that_take_too_long(model):
    with pytest.raises(ContextOverflowError) as raised:
        model.invoke("x " * 9000)
    assert isinstance(raised.value, ContextWindowError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again)) == (ContextWindowError, str(raised.value))
    with pytest.raises(ModelInvalidRequestError, match="'max_words'"):
        model.invoke("Hi", max_word=2)
    late: dict[str, Any] = {"timeout": 1e-6}
    with pytest.raises(ModelTimeoutError):
        await model.ainvoke("Hi", **late)
    with pytest.raises(RequestTimeoutError):
        list(type(model)(engine=model.engine, **late).stream("Hi"))
