"""What the models refuse: the type of the error, and the option or part that it names."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langgraph.graph import END, START, StateGraph
from langgraph.types import RetryPolicy

from adafuse_llm import (
    ContextWindowError,
    InvalidInputError,
    InvalidOptionError,
    MemberUnavailableError,
    QueueFullError,
)
from langchain_adafuse import AdaFuseLLM, ChatAdaFuse

BOTH = pytest.mark.parametrize("kind", [AdaFuseLLM, ChatAdaFuse])
WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_word": 2}, "'max_words'"),
    ({"max_words": 0}, "'max_words'"),
    ({"n": 2}, "'n'"),
    ({"num_beams": 2}, "'num_beams'"),
    ({"base_url": "http://a"}, "RemoteEngine"),
    ({"round_detail": "some"}, "'round_detail'"),
    ({"use": "quil"}, "'quill'"),
    ({"timeout": "5 seconds"}, "'timeout'"),
    ({"timeout": 0}, "'timeout'"),
    ({"timeout": float("nan")}, "'timeout'"),
]


@BOTH
@pytest.mark.parametrize(("options", "named"), WRONG_OPTIONS, ids=str)
async def test_a_wrong_option_is_named_at_once_in_one_line(kind, obliging, options, named):
    model = kind(engine=obliging)

    async def call(function):
        return function("Hi", **options)

    async def astream():
        return [chunk async for chunk in model.astream("Hi", **options)]

    for way in (
        lambda: call(lambda prompt, **options: kind(engine=obliging, **options)),
        lambda: call(model.invoke),
        lambda: call(lambda prompt, **options: list(model.stream(prompt, **options))),
        lambda: call(lambda prompt, **options: model.batch([prompt] * 2, **options)),
        lambda: model.ainvoke("Hi", **options),
        lambda: model.abatch(["Hi"] * 2, **options),
        astream,
    ):
        with pytest.raises(InvalidOptionError, match=named) as caught:
            await way()
        assert "\n" not in str(caught.value)


@pytest.mark.quick
@BOTH
def test_members_and_texts_that_are_missing_are_asked_for(kind, obliging, monkeypatch):
    with pytest.raises(InvalidInputError, match="members="):
        kind()
    monkeypatch.setenv("ADAFUSE_MEMBERS", "a/b")
    nobodies: list[Any] = [[], iter([])]
    for nobody in nobodies:
        with pytest.raises(InvalidInputError, match="members is empty"):
            kind(members=nobody)
    with pytest.raises(InvalidInputError, match="text"):
        kind(engine=obliging).invoke("")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tools", "options", "named"),
    [
        ([{"type": "web_search"}], {}, "function"),
        ([{"type": "function"}], {}, "function"),
        (None, {"tool_choice": "multiple"}, "'multiply'"),
        (None, {"tool_choice": ["multiply"]}, "tool_choice"),
        (None, {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (None, {"enforce": "yes"}, "enforce"),
    ],
    ids=str,
)
def test_tools_and_choices_that_cannot_be_read(chat, tools, options, named):
    multiply = {"type": "function", "function": {"name": "multiply", "parameters": {}}}
    tools = [multiply] if tools is None else tools
    with pytest.raises((InvalidInputError, InvalidOptionError), match=named):
        chat.bind_tools(tools, **options).invoke("Hi")
    with pytest.raises((InvalidInputError, InvalidOptionError), match=named):
        chat.invoke("Hi", tools=tools, **options)


@pytest.mark.quick
def test_pictures_and_results_of_unknown_calls(chat):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidInputError, match="text"):
        chat.invoke([HumanMessage([picture])])
    with pytest.raises(InvalidInputError, match="result"):
        chat.invoke([HumanMessage("Hi"), ToolMessage("3", tool_call_id="9")])


A_NUMBER = {"properties": {"a": {"type": "number"}}}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("schema", "options", "named"),
    [
        (A_NUMBER, {"method": "grammar"}, "json_schema"),
        (None, {}, "schema"),
    ],
    ids=str,
)
def test_schemas_that_cannot_be_used_are_refused_before_any_call(chat, schema, options, named):
    given = schema and {"title": "City", **schema}
    with pytest.raises((InvalidInputError, InvalidOptionError), match=named):
        chat.with_structured_output(given, **options)


def test_a_prompt_that_is_too_long_is_langchains_error_for_it(llm):
    with pytest.raises(ContextOverflowError) as raised:
        llm.invoke("x " * 9000)
    assert isinstance(raised.value.__cause__, ContextWindowError)


def test_graphs_try_again_after_errors_that_pass():
    errors = iter([QueueFullError("full"), MemberUnavailableError("far", "it is away")])

    def respond(state):
        for error in errors:
            raise error
        return "Good day."

    state: Any = str
    graph = StateGraph(state)
    graph.add_node("respond", respond, retry_policy=RetryPolicy(initial_interval=0.001))
    graph.add_edge(START, "respond")
    graph.add_edge("respond", END)
    assert graph.compile().invoke("Hi") == "Good day."
