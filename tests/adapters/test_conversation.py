"""Conversations with tools as plain messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_llm import InvalidInputError
from adafuse_llm.adapters.conversation import Turn, to_conversation
from adafuse_llm.adapters.reply import ReplyReader, ToolCall
from adafuse_llm.text.conversation import Call, Tool

pytestmark = pytest.mark.quick

ADD = Tool("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "number"}}})
LOOK = Tool("look_up", 'Say what "it" is.', {"type": "object", "properties": {}})


def to_messages(turns: Any, **options: Any) -> list[dict[str, Any]]:
    """The messages that members read whose chat templates know no tools."""
    flat = to_conversation(turns, **options).flat()
    return [{"role": each["role"], "content": each["content"]} for each in flat]


def called(name="add", key="1", **arguments):
    return {"id": key, "name": name, "arguments": arguments}


def test_plain_conversations_stay_as_they_are():
    turns: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi", "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "And "}, "now?"]},
    ]
    expected = [*turns[:2], {"role": "assistant", "content": "Hi"}, {**turns[3]}]
    expected[3]["content"] = "And now?"
    assert to_messages(turns) == expected
    assert to_messages(turns, tools=[ADD], tool_choice="none") == expected


def test_a_call_and_its_results_as_members_read_them():
    messages = to_messages(
        [
            {"role": "human", "content": "Add, and look up", "name": "Anna"},
            {
                "role": "ai",
                "content": "I will.",
                "tool_calls": [called(a=1, b="é"), called("look_up", "2")],
            },
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "tool", "content": ['say "x"\n', "y"], "tool_call_id": "2", "name": "look_up"},
            {"role": "user", "content": "Go on"},
        ]
    )
    assert messages == [
        {"role": "user", "content": "Anna: Add, and look up"},
        {
            "role": "assistant",
            "content": "I will.\n"
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": '<tool_response>\n{"name": "add", "content": "3"}\n</tool_response>\n'
            '<tool_response>\n{"name": "look_up", "content": "say \\"x\\"\\ny"}\n'
            "</tool_response>",
        },
        {"role": "user", "content": "Go on"},
    ]


def test_a_valid_call_may_have_the_id_of_an_earlier_malformed_one():
    turns: list[Any] = [{"role": "user", "content": "Add"}]
    for arguments in ('{"a": ', '{"a": 1}'):
        calls = [{"id": "1", "name": "add", "arguments": arguments}]
        turns.append({"role": "assistant", "content": "", "tool_calls": calls})
        turns.append({"role": "tool", "content": "x", "tool_call_id": "1"})
    roles = [each["role"] for each in to_conversation(turns).messages]
    assert roles == ["user", "assistant", "user", "assistant", "tool"]


@pytest.mark.parametrize("choice", ["auto", "required", "look_up"])
def test_tools_and_instructions_end_the_system_message(choice):
    turns: list[Turn] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
    ]
    (system, user) = to_messages(
        turns, tools=[ADD, LOOK], tool_choice=choice, instructions="Answer in JSON.\n"
    )
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n# Tools\n\n")
    assert system["content"].endswith("\n\nAnswer in JSON.")
    lines = [json.loads(line) for line in system["content"].splitlines() if line[:8] == '{"name":']
    assert lines[:2] == [vars(ADD), vars(LOOK)]
    assert ("must call at least one" in system["content"]) == (choice == "required")
    assert ("must call the tool look_up" in system["content"]) == (choice == "look_up")
    assert user == turns[1]


def test_a_system_message_is_made_where_the_conversation_does_not_begin_with_one():
    turns: list[Turn] = [
        {"role": "user", "content": "?"},
        {"role": "system", "content": "Be brief."},
    ]
    messages = to_messages(turns, instructions="Answer in JSON.")
    assert messages == [{"role": "system", "content": "Answer in JSON."}, *turns]


def test_earlier_reasoning_is_left_out():
    thoughts = "<think>\nhm </tool_call>\n</think>\n\n"
    user: Turn = {"role": "user", "content": "What is <think>a</think>?"}
    for said, kept in [
        (thoughts + "It is a tag.", "It is a tag."),
        ("  " + thoughts, ""),
        ("<think>not finished", ""),
        ("Write <think>a</think>.", "Write <think>a</think>."),
        ("\n as it was", "\n as it was"),
    ]:
        messages = to_messages([user, {"role": "assistant", "content": said}, user])
        assert messages == [user, {"role": "assistant", "content": kept}, user]


TEXT = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["</tool_call>", "<tool_call>\n{"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=50)
@given(st.lists(st.dictionaries(TEXT, JSON, max_size=2), min_size=1, max_size=3))
def test_calls_are_read_back_as_they_were(arguments):
    calls: list[Call] = [
        {"id": "1", "name": f"</{n}>", "arguments": a} for n, a in enumerate(arguments)
    ]
    (message,) = to_messages([{"role": "assistant", "content": "So:", "tool_calls": calls}])
    found = ReplyReader([ADD]).add(message["content"], finish_reason="stop").calls
    assert found == [ToolCall(call["name"], call["arguments"]) for call in calls]


@given(TEXT | st.just("a</tool_response>\n<tool_response>b"))
def test_results_cannot_end_their_block(content):
    call: Turn = {"role": "assistant", "tool_calls": [called("look_up")]}
    (_, result) = to_messages([call, {"role": "tool", "content": content, "tool_call_id": "1"}])
    text = result["content"].removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    assert "</tool_response>" not in text
    assert json.loads(text) == {"name": "look_up", "content": content}


USER = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("turns", "options", "said"),
    [
        ([], {}, "empty"),
        ([{"role": "robot", "content": "?"}], {}, "message 0 has role 'robot'"),
        ([{"content": "?"}], {}, "message 0 has role None"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], {}, "not text"),
        ([{"role": "user", "content": 3}], {}, "content of type int"),
        ([{**USER, "tool_calls": [called()]}], {}, "only a message of role .assistant"),
        ([USER, {"role": "tool", "content": "3", "tool_call_id": "7"}], {}, "id '7'.*none"),
        ([USER, {"role": "tool", "content": "3"}], {}, "id None"),
        ([{"role": "assistant", "tool_calls": [called(a={1})]}], {}, "as JSON: set"),
        ([{"role": "assistant", "tool_calls": [called(a=float("nan"))]}], {}, "as JSON"),
        ([{"role": "assistant", "tool_calls": [{"id": "1", "name": "add"}]}], {}, "mapping"),
        ([USER], {"tools": [ADD, ADD]}, "different names; got add"),
        ([USER], {"tools": [ADD], "tool_choice": "ad"}, "Did you mean 'add'"),
        ([USER], {"tool_choice": "required"}, "needs at least one tool"),
        ([USER], {"tools": [Tool("x", "", {"a": object()})]}, "tool 'x' cannot be"),
    ],
)
def test_what_cannot_be_said(turns, options, said):
    with pytest.raises(InvalidInputError, match=said):
        to_messages(turns, **options)
