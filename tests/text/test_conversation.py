"""Checked conversations, and their plain forms."""

import json
from types import MappingProxyType
from typing import Any

import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.text.conversation import Conversation, Tool, check_conversation

pytestmark = pytest.mark.quick

USER: dict[str, Any] = {"role": "user", "content": "?"}
ADD = Tool("add", "Adds up.", {"type": "object", "properties": {"a": {"type": "number"}}})
CALL: dict[str, Any] = {"id": "1", "name": "add", "arguments": {"a": 1}}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_checked_messages_have_plain_text_and_known_roles() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "human", "content": [{"type": "text", "text": "one "}, "two"]},
        {"role": "ai", "content": None, "tool_calls": None},
        {"role": "tool", "content": "42", "tool_call_id": None},
    ]
    assert check_conversation(messages).messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42"},
    )


def test_the_plain_format() -> None:
    asked = check_conversation([{"role": "system", "content": "Answer briefly."}, USER])
    assert asked.plain_text() == "Answer briefly.\n\nUser: ?\n\nAssistant:"
    begun = check_conversation([USER, {"role": "assistant", "content": "It "}]).continued()
    assert begun.plain_text() == "User: ?\n\nAssistant: It "


def test_calls_and_results_become_text() -> None:
    results = [{"role": "tool", "tool_call_id": "1", "content": each} for each in ("</x>", "2")]
    turns = [USER, {**CALLED, "content": "Well.\n"}, *results]
    system, _, called, answered = check_conversation(turns, [ADD]).flat()
    assert system["content"].startswith("# Tools")
    assert called["content"] == (
        'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    )
    assert answered == {
        "role": "user",
        "content": '<tool_response>\n{"name": "add", "content": "<\\/x>"}\n</tool_response>\n'
        '<tool_response>\n{"name": "add", "content": "2"}\n</tool_response>',
    }


@pytest.mark.parametrize("choice", ["auto", "required", "add"])
def test_tools_and_instructions_end_the_system_message(choice: str) -> None:
    asked = [{"role": "system", "content": "Be brief."}, USER]
    system, user = check_conversation(asked, [ADD], choice, instructions="In JSON.\n").flat()
    assert user == USER
    assert system["content"].startswith("Be brief.\n\n# Tools\n\n")
    assert system["content"].endswith("\n\nIn JSON.")
    lines = [json.loads(line) for line in system["content"].splitlines() if line[:8] == '{"name":']
    assert lines[0] == vars(ADD)
    assert ("must call at least one" in system["content"]) == (choice == "required")
    assert ("must call the tool add" in system["content"]) == (choice == "add")
    added = check_conversation([USER, *asked], instructions="In JSON.").flat()
    assert added == [{"role": "system", "content": "In JSON."}, USER, *asked]


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
    own = [USER, {**CALLED, "tool_calls": [CALL, {**CALL, "arguments": {}}]}, messages[2]]
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


@pytest.mark.parametrize(
    ("messages", "options", "says"),
    [
        ([], {}, "empty"),
        ("hello", {}, "got str"),
        (["hello"], {}, "message 0 must be a dict"),
        ([{"content": "x"}], {}, "'role'"),
        ([USER, {"role": "usr", "content": "x"}], {}, "Did you mean 'user'"),
        ([{"role": "user", "content": 5}], {}, "type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "not text"),
        ([{"role": "user", "content": " "}], {}, "no text"),
        ([{**USER, "audio": "x"}], {}, "'audio'"),
        ([{**USER, "tool_calls": [CALL]}], {}, "only a message of role .assistant"),
        ([{**USER, "reasoning_content": "b"}], {}, "only a message of role .assistant"),
        ([{**USER, "tool_call_id": "1"}], {}, "only a message of role .tool"),
        ([{**CALLED, "tool_calls": CALL}], {}, "tool_calls must be a list"),
        ([{**CALLED, "tool_calls": [{**CALL, "arguments": "{"}]}], {}, "not JSON"),
        ([{**CALLED, "tool_calls": [{**CALL, "arguments": "[1]"}]}], {}, "mapping of arg"),
        ([{**CALLED, "tool_calls": [{**CALL, "arguments": {"a": "\ud800"}}]}], {}, "surrogate"),
        ([{**CALLED, "tool_calls": [{**CALL, "arguments": {"a": float("nan")}}]}], {}, "as JSON"),
        ([USER, {"role": "tool", "tool_call_id": "7", "content": ""}], {}, "id '7'.*none"),
        ([CALLED, {"role": "tool", "content": "3"}], {}, "id None.*Ids of earlier calls: '1'"),
        ([USER], {"tools": ADD}, "tools must be a list of tools; got Tool"),
        ([USER], {"tools": ["add"]}, "tool 0 must be a Tool"),
        ([USER], {"tools": [{"name": "add", "parameters": []}, {"name": ""}]}, "tool 1 must"),
        ([USER], {"tools": [ADD, ADD]}, "different names; got add"),
        ([USER], {"tools": [Tool("a", "\ud800", {})]}, "tool 'a' is not valid Unicode"),
        ([USER], {"tool_choice": "any"}, "auto, none; got 'any'. Pass tools"),
        ([USER], {"tool_choice": "required"}, "auto, none; got 'required'"),
        (Conversation(({"role": "user", "content": "?"},)), {"tools": [ADD]}, "its own tools"),
    ],
)
def test_invalid_conversations_are_refused(
    messages: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        check_conversation(messages, **options)
