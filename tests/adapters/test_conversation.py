"""Turns of frameworks as conversations of the engine."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.adapters.reply import ReplyReader, ToolCall
from adafuse_llm.text.conversation import Tool

pytestmark = pytest.mark.quick

USER: dict[str, Any] = {"role": "user", "content": "?"}
ADD = Tool("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "number"}}})


def called(arguments: Any, content: str = "") -> dict[str, Any]:
    calls = [{"id": "1", "name": "add", "arguments": arguments}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "1"}


def flat(*turns: Any) -> list[str]:
    """The text that members read if their chat templates know no tools."""
    return [each["content"] for each in to_conversation(turns).flat()]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({**USER, "name": "Anna"}, {"role": "user", "content": "Anna: ?"}),
        ({"role": "ai", "content": "Hi", "name": "x"}, {"role": "assistant", "content": "Hi"}),
        (
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
            {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": "<think>a</think>b", "reasoning": ""},
            {"role": "assistant", "content": "<think>a</think>b"},
        ),
        (
            {"role": "assistant", "content": "c", "reasoning": "so"},
            {"role": "assistant", "content": "c", "reasoning_content": "so"},
        ),
        (
            {"role": "assistant", "content": "Write <think>a</think>."},
            {"role": "assistant", "content": "Write <think>a</think>."},
        ),
        ({"role": "user", "content": "<think>a</think>"}, None),
        ({**USER, "content": ["a", {"text": "b"}]}, {"role": "user", "content": "ab"}),
    ],
)
def test_names_and_reasoning_of_turns(turn: Any, message: Any) -> None:
    turns: list[Any] = [turn, USER]
    assert to_conversation(turns).messages[0] == (message or turn)


# Calls and results that do not fit ------------------------------------------------------------


def test_a_call_and_its_result_without_an_id_belong_together() -> None:
    calls = [{"name": "a", "arguments": None}, {"name": "b", "arguments": ""}]
    three, four = ({"role": "tool", "content": each} for each in "34")
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    turns: list[Any] = [USER, asked, three, four, asked, three]
    _, first, *answers, second, last = to_conversation(turns).messages
    read = [*first["tool_calls"], second["tool_calls"][0]]
    assert [each["id"] for each in read] == [each["tool_call_id"] for each in (*answers, last)]
    assert len({each["id"] for each in read}) == 3
    assert [each["arguments"] for each in read] == [{}] * 3


def test_parts_of_a_result_are_lines_and_parts_without_text_are_notes_with_one_warning() -> None:
    told: list[str] = []
    picture, mixed = {"type": "image"}, {"type": "audio", "text": None}
    turns: list[Any] = [
        {**called({}), "content": ["I look.", picture]},
        {**result(""), "content": ["3", picture]},
        {**USER, "content": ["Go", mixed]},
    ]
    read = [each["content"] for each in to_conversation(turns, warn=told.append).messages]
    assert read == ["I look.", "3\n[image, not shown]", "Go[audio, not shown]"]
    (warning,) = told
    assert warning.endswith(": audio, image")


def test_a_result_whose_call_is_missing_is_read_as_text_with_one_warning() -> None:
    told: list[str] = []
    lost = [result("3"), {"role": "tool", "content": "4", "name": "add"}]
    turns: list[Any] = [*lost, USER]
    messages = to_conversation(turns, warn=told.append).messages
    written = ['{"content": "3"}', '{"name": "add", "content": "4"}']
    texts = [f"<tool_response>\n{each}\n</tool_response>" for each in written]
    assert [each["content"] for each in messages] == [*texts, "?"]
    assert {each["role"] for each in messages} == {"user"}
    assert len(told) == 1
    assert "results of calls that are missing" in told[0]


# Calls whose arguments are no JSON ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": 1', '{"name": "add", "arguments": {"a": 1}'),
        ("[1]", '{"name": "add", "arguments": [1]}'),
        ([1], '{"name": "add", "arguments": [1]}'),
        ('<tool_call>\n{"name": "add", "arg', '{"name": "add", "arg'),
    ],
)
def test_a_malformed_call_and_its_result_are_read_as_text(arguments: Any, written: str) -> None:
    assert flat(called(arguments, content="So:\n"), result("no")) == [
        f"So:\n<tool_call>\n{written}\n</tool_call>",
        '<tool_response>\n{"name": "add", "content": "no"}\n</tool_response>',
    ]


def test_a_valid_call_may_have_the_id_of_an_earlier_malformed_one() -> None:
    turns: list[Any] = [USER, called('{"a": '), result("x"), called('{"a": 1}'), result("y")]
    roles = [each["role"] for each in to_conversation(turns).messages]
    assert roles == ["user", "assistant", "user", "assistant", "tool"]


# Calls in the common form ---------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["</tool_call>", "<tool_call>\n{", "a</tool_response>\n<tool_response>b"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=50)
@given(st.lists(st.dictionaries(TEXT, JSON, max_size=2), min_size=1, max_size=3))
def test_calls_are_read_back_as_they_were(arguments: list[dict[str, Any]]) -> None:
    calls = [{"id": "1", "name": f"</{n}>", "arguments": a} for n, a in enumerate(arguments)]
    (text,) = flat({"role": "assistant", "content": "So:", "tool_calls": calls})
    end: Any = SimpleNamespace(finish_reason="stop", cut_by="")
    found = ReplyReader([ADD]).add(text, end=end).calls
    assert found == [ToolCall(str(call["name"]), call["arguments"]) for call in calls]  # type: ignore[arg-type]


@given(TEXT, st.sampled_from([{}, "{"]))
def test_results_cannot_end_their_block(content: str, arguments: Any) -> None:
    _, text = flat(called(arguments), result(content))
    inside = text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    assert "</tool_response>" not in inside
    assert json.loads(inside) == {"name": "add", "content": content}
