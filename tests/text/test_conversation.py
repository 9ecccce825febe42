"""Checked conversations with tools."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.text.chat import Tool
from adafuse_llm.text.conversation import Conversation, calls_in, check_conversation

pytestmark = pytest.mark.quick

USER: dict[str, Any] = {"role": "user", "content": "?"}
ADD = Tool("add", "Adds up.", {"type": "object", "properties": {"a": {"type": "number"}}})
CALL: dict[str, Any] = {"id": "1", "name": "add", "arguments": {"a": 1}}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_a_conversation_without_tools_stays_as_it_is() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER, {"role": "tool", "content": "t"}]
    conversation = check_conversation(messages)
    assert not conversation.has_tools
    assert conversation.flat() == messages
    assert check_conversation(conversation) is conversation


def test_calls_results_and_tools_in_the_form_of_openai() -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": text}}
                for text in ('{"a": 1}', "")
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "1"},
    ]
    function = {"name": "add", "description": "Adds up.", "parameters": ADD.parameters}
    own = [
        USER,
        {**CALLED, "tool_calls": [CALL, {**CALL, "arguments": {}}]},
        messages[2],
    ]
    expected = check_conversation(own, [ADD], "add")
    for tool in ({"type": "function", "function": function}, function):
        assert check_conversation(messages, [tool], "add") == expected
    assert expected.messages[1]["tool_calls"][0] == CALL
    assert expected.request.endswith("must call the tool add.")


def test_no_tools_are_left_with_tool_choice_none() -> None:
    conversation = check_conversation([USER], [ADD], "none")
    assert conversation == check_conversation([USER])
    assert conversation.request == ""


def test_mappings_of_other_types_become_plain_json() -> None:
    schema = MappingProxyType({"type": "object", "properties": MappingProxyType({})})
    conversation = check_conversation([USER], [Tool("add", "", schema)])
    assert conversation.tools[0].parameters == {"type": "object", "properties": {}}


def test_all_texts_are_mapped_and_nothing_else() -> None:
    turns = [USER, CALLED, {"role": "tool", "tool_call_id": "1", "content": "3"}]
    conversation = check_conversation(turns, [ADD], "add", instructions="Briefly.")
    texts = conversation.texts()
    assert {"?", "3", "add", "Adds up.", "Briefly.", "a", "number"} <= set(texts)
    assert "1" not in texts
    upper = conversation.map_texts(str.upper)
    assert sorted(upper.texts()) == sorted(text.upper() for text in texts)
    assert upper.map_texts(str.lower).messages == conversation.messages
    assert upper.request.endswith("must call the tool ADD.")
    assert [m["role"] for m in upper.messages] == ["user", "assistant", "tool"]


def test_calls_are_found_in_text() -> None:
    flat = check_conversation([USER, CALLED]).flat()
    text = f"{flat[1]['content']} <tool_call>not JSON</tool_call>"
    assert list(calls_in(text)) == [{"name": "add", "arguments": {"a": 1}}]


@pytest.mark.parametrize(
    ("messages", "options", "says"),
    [
        ([], {}, "empty"),
        ("hello", {}, "got str"),
        ([{"role": "user", "content": " "}], {}, "no text"),
        (
            [{**USER, "audio": "x"}],
            {},
            "'audio'; only 'role', 'content', 'tool_calls', 'tool_call_id' and",
        ),
        ([{**USER, "tool_calls": [CALL]}], {}, "only an assistant message"),
        ([{**USER, "tool_call_id": "1"}], {}, "only a tool message"),
        ([{**CALLED, "tool_calls": CALL}], {}, "tool_calls of type dict"),
        ([{**CALLED, "tool_calls": ["add"]}], {}, "without a name or a mapping"),
        ([{**CALLED, "tool_calls": [{**CALL, "arguments": "{"}]}], {}, "not JSON"),
        ([{**CALLED, "tool_calls": [{**CALL, "arguments": "[1]"}]}], {}, "mapping of arg"),
        ([{**CALLED, "tool_calls": [{**CALL, "arguments": {"a": "\ud800"}}]}], {}, "surrogate"),
        ([{**CALLED, "tool_calls": [{**CALL, "name": "\ud800"}]}], {}, "surrogate"),
        ([USER, {"role": "tool", "tool_call_id": "7", "content": ""}], {}, "id '7'.*none"),
        ([CALLED, {"role": "tool", "content": "3"}], {}, "id None.*Ids of earlier calls: '1'"),
        ([USER], {"tools": ADD}, "tools must be a list of tools; got Tool"),
        ([USER], {"tools": {"name": "add"}}, "list of tools; got dict"),
        ([USER], {"tools": ["add"]}, "tool 0 must be a Tool"),
        ([USER], {"tools": [{"type": "web_search"}]}, "tool 0 must be a Tool"),
        ([USER], {"tools": [{"name": "add", "parameters": []}, {"name": ""}]}, "tool 1 must"),
        ([USER], {"tools": [ADD, ADD]}, "different names; got add"),
        ([USER], {"tools": [{"name": str(n)} for n in range(1_001)]}, "at most 1,000 tools"),
        ([USER], {"tools": [Tool("a", "\ud800", {})]}, "tool 'a' is not valid Unicode"),
        ([USER], {"tool_choice": "any"}, "no tools given.*got 'any'"),
        ([USER], {"tool_choice": "required"}, "at least one tool"),
        (Conversation(({"role": "user", "content": "?"},)), {"tools": [ADD]}, "its own tools"),
    ],
)
def test_invalid_conversations_are_refused(
    messages: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        check_conversation(messages, **options)
