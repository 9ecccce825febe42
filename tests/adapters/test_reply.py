"""Replies taken apart as they stream."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafuse_llm.adapters.reply import (
    InvalidToolCall,
    Reasoning,
    ReplyParser,
    ReplyReader,
    Text,
    ToolCall,
)
from adafuse_llm.text.conversation import Tool

pytestmark = pytest.mark.quick

ADD = '\n{"name": "add", "arguments": {"a": 1}}\n'
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def parsed(*pieces, tools=False):
    """The parts of a reply, neighbouring texts of one kind joined."""
    parser = ReplyParser(tools=tools)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.close()
    joined: list[Any] = []
    for part in parts:
        kind = type(part)
        if kind in (Text, Reasoning) and joined and type(joined[-1]) is kind:
            part = kind(joined.pop().text + part.text)  # noqa: PLW2901
        joined.append(part)
    return joined


def test_text_reasoning_and_calls():
    assert parsed(f"\n<think>hm, <tool_call>?</think>\nSo:\n<tool_call>{ADD}</tool_call> done",
                  tools=True) == [
        Text("\n"),
        Reasoning("hm, <tool_call>?"),
        Text("\nSo:\n"),
        ToolCall("add", {"a": 1}, ADD),
        Text(" done"),
    ]  # fmt: skip


def test_calls_are_text_where_there_are_no_tools():
    said = f"<think>a</think><tool_call>{ADD}</tool_call>"
    assert parsed(said) == [Reasoning("a"), Text(f"<tool_call>{ADD}</tool_call>")]


def test_reasoning_comes_first_or_it_is_text():
    said = "Write <think>x</think> in your prompt."
    assert parsed(said, tools=True) == [Text(said)]
    call = f"<tool_call>{ADD}</tool_call>"
    assert parsed(f"{call}\n<think>x</think>", tools=True)[1:] == [Text("\n"), Reasoning("x")]


def test_what_may_be_a_marker_is_held_back_and_nothing_else():
    parser = ReplyParser(tools=True)
    assert parser.feed("a <b> <tool_") == [Text("a <b> ")]
    assert parser.feed("x <tool_call") == [Text("<tool_x ")]
    assert parser.feed(">") == []
    assert parser.feed('{"name": "add", ') == []
    assert parser.feed('"arguments": {}}</tool_call') == []
    assert parser.feed(">\n") == [
        ToolCall("add", {}, '{"name": "add", "arguments": {}}'),
        Text("\n"),
    ]
    assert parser.feed("<") == []
    assert parser.close() == [Text("<")]
    assert parser.close() == []


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ("", None, "not JSON"),
        ('{"name": "add", "arguments": {"a": 1}', None, "not JSON"),
        ("{'name': 'add', 'arguments': {}}", None, "not JSON"),
        ('[{"name": "add", "arguments": {}}]', None, '"name"'),
        ('{"name": 3, "arguments": {}}', None, '"name"'),
        ('{"name": "add"}', "add", '"arguments"'),
        ('{"name": "add", "arguments": "{}"}', "add", '"arguments"'),
        ('{"name": "add", "arguments": {"a": NaN}}', None, "NaN"),
        ('{"name": "add", "arguments": {}} {"name": "b", "arguments": {}}', None, "not JSON"),
        ("[" * 100_000, None, "not JSON"),
    ],
)
def test_malformed_calls_are_told_and_never_repaired(text, name, error):
    (part,) = parsed(f"<tool_call>{text}</tool_call>", tools=True)
    assert isinstance(part, InvalidToolCall)
    assert (part.name, part.text) == (name, text)
    assert error in part.error


def test_a_marker_inside_a_string_closes_no_call_unless_the_string_never_ends():
    call = '{"name": "add", "arguments": {"a": "</tool_call>"}}'
    assert parsed(f"<tool_call>{call}</tool_call> x", tools=True) == [
        ToolCall("add", {"a": "</tool_call>"}, call),
        Text(" x"),
    ]
    unfinished = '{"name": "add", "arguments": {"a": "1}}'
    for rest in ("", "\n", f"\n<tool_call>{ADD}</tool_call>"):
        first, *others = parsed(f"<tool_call>{unfinished}</tool_call>{rest}", tools=True)
        assert isinstance(first, InvalidToolCall)
        assert first.text == unfinished
        assert others == parsed(rest, tools=True)


@pytest.mark.parametrize("number", ["1e400", "-1E+999", "9" * 5000])
def test_a_call_with_a_number_that_is_too_large_is_invalid(number):
    """A tool must not run with another number."""
    call = f'{{"name": "add", "arguments": {{"a": {number}}}}}'
    (part,) = parsed(f"<tool_call>{call}</tool_call>", tools=True)
    assert isinstance(part, InvalidToolCall)
    assert "number" in part.error


def test_half_a_character_in_a_call_is_replaced_because_it_cannot_be_encoded():
    call = r'{"name": "add", "arguments": {"a": "x\ud83d", "b": "\ud83d\ude42"}}'
    (part,) = parsed(f"<tool_call>{call}</tool_call>", tools=True)
    assert part.arguments == {"a": "x\ufffd", "b": "🙂"}


def test_a_reply_that_ends_inside_a_call():
    begun = ADD[:-2]  # its last brace is missing
    (text, call) = parsed(f"So: <tool_call>{begun}</tool", tools=True)
    assert text == Text("So: ")
    assert call == InvalidToolCall("add", f"{begun}</tool", "it is not closed by </tool_call>")
    for end in ("", "<", "</tool"):  # only the marker is missing
        assert parsed(f"<tool_call>{ADD}{end}", tools=True) == [ToolCall("add", {"a": 1}, ADD)]


TOOLS = [Tool("add", "", {"properties": {"a": {"type": "integer"}}, "required": ["a"]})]


@pytest.mark.parametrize(
    ("own", "closing", "kinds", "content"),
    [
        (f"<tool_call>{ADD[:-3]}", "}}\n</tool_call>", [InvalidToolCall], ""),
        (f"<tool_call>{ADD}", "</tool_call>", [ToolCall], ""),
        (f"<tool_call>{ADD}</tool", "_call>", [ToolCall], ""),
        ("<tool", f"_call>{ADD}</tool_call>", [InvalidToolCall], ""),
        ("", f"<tool_call>{ADD}</tool_call>", [InvalidToolCall], ""),
        (f"<tool_call>{ADD}</tool_call>\n<tool_call>", f"{ADD}</tool_call>",
         [ToolCall, InvalidToolCall], ""),
        (ADD[1:-3], "}}", [], ADD.strip()),
        ('{"b": "', '"}', [], '{"b": ""}'),
        ("<think>hm", "</think>", [], ""),
    ],
)  # fmt: skip
def test_the_text_that_closes_a_reply_completes_its_text_but_no_call(own, closing, kinds, content):
    delta = ReplyReader(TOOLS).add(own + closing, "", "length", closing)
    assert [type(call) for call in delta.calls] == kinds
    assert delta.content == content
    assert all("max_tokens" in c.error for c in delta.calls if isinstance(c, InvalidToolCall))
    assert bool(delta.warnings) == (kinds[-1:] == [InvalidToolCall] or not kinds)


replies = st.lists(
    st.sampled_from([*MARKERS, ADD, "<", "</", "<tool", "text", " ", "\n", "\U0001f600"]),
    max_size=12,
).map("".join)  # fmt: skip


@given(replies, st.data(), st.booleans())
def test_the_parts_do_not_depend_on_how_a_reply_is_cut(reply, data, tools):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)))))
    pieces = [reply[a:b] for a, b in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
    assert parsed(*pieces, tools=tools) == parsed(reply, tools=tools)
