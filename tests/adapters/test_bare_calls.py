"""Replies that are nothing but the JSON of tool calls, without markers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafuse_llm.adapters.reply import InvalidToolCall, ReplyReader, Text, ToolCall
from adafuse_llm.text.conversation import Tool

pytestmark = pytest.mark.quick

TOOLS = (
    Tool("add", "Adds.", {"type": "object", "properties": {}, "required": ["a", "b"]}),
    Tool("now", "Tells the time.", {}),
    Tool("größe", "Tells a size.", {"properties": {"of": {"type": "string"}}}),
)
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
NOW = '{"arguments": {}, "name": "now"}'
SIZE = '{"name": "größe", "arguments": {"of": "```[{\\"x\\u00e9"}}'

ADDED = ("add", {"a": 1, "b": 2})
TOLD: tuple[str, Any] = ("now", {})
SIZED = ("größe", {"of": '```[{"xé'})

CALLS: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "one": (ADD, [ADDED]),
    "in lines": (json.dumps(json.loads(ADD), indent=2), [ADDED]),
    "another order of keys": (NOW, [TOLD]),
    "escapes": (SIZE, [SIZED]),
    "several": (f"{ADD}\n{NOW}{SIZE}", [ADDED, TOLD, SIZED]),
    "a list": (f"[{ADD}, {NOW}]", [ADDED, TOLD]),
    "fenced": (f"```json\n{ADD}\n```", [ADDED]),
    "a fenced list": (f"```json\n[{ADD}, {NOW}]\n```", [ADDED, TOLD]),
    "several fences": (f"```json\n{ADD}\n```\n```json\n{NOW}\n```", [ADDED, TOLD]),
    "a fence that is not closed": (f"```json\n{ADD}", [ADDED]),
}

TEXTS: dict[str, tuple[str, str]] = {
    "prose": ("The sum is 3.", ""),
    "an answer in JSON": ('{"price": 3, "currency": "EUR"}', ""),
    "a name alone": ('{"name": "add"}', ""),
    "code": ("```python\nprint(1)\n```", ""),
    "an empty list": ("[]", ""),
    "nothing": ("", ""),
    "a fence": ("```", ""),
    "an unknown tool": ('{"name": "sub", "arguments": {}}', "there is no tool 'sub'"),
    "a missing argument": ('{"name": "add", "arguments": {"a": 1}}', "lacks the arguments b"),
    "another key": ('{"name": "now", "arguments": {}, "x": 1}', "not an object with a name and"),
    "a calculation": ('{"name": "now", "arguments": {"a": 1 + 2, "b": 7}}', "not JSON"),
    "text after the call": (f"{ADD}\nThis adds the numbers.", "also has other text"),
    "one of two is unknown": (f'{ADD}\n{{"name": "sub", "arguments": {{}}}}', "no tool 'sub'"),
    "cut off": (ADD[:-3], "not JSON"),
    "a list that is cut off": (f"[{ADD}, {NOW}", "not JSON"),
}


def read(*pieces: str, reason: str = "stop", **options: Any) -> tuple[list[Any], list[str]]:
    """All parts of a reply, with neighbouring texts joined, and its warnings."""
    reader = ReplyReader(TOOLS, **options)
    deltas = [reader.add(piece) for piece in pieces]
    deltas.append(reader.add("", finish_reason=reason))
    parts: list[Any] = []
    for part in (part for delta in deltas for part in delta.parts):
        if isinstance(part, Text) and parts and isinstance(parts[-1], Text):
            parts[-1] = Text(parts[-1].text + part.text)
        else:
            parts.append(part)
    assert not any(delta.warnings for delta in deltas[:-1])
    return parts, deltas[-1].warnings


def called(parts: list[Any]) -> list[tuple[str, Any]]:
    return [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_reply_that_is_nothing_but_calls_becomes_calls(case: str, size: int) -> None:
    text, expected = CALLS[case]
    parts, warnings = read(*(text[at : at + size] for at in range(0, len(text), size)))
    assert called(parts) == expected
    assert "".join(part.text for part in parts if isinstance(part, Text)).strip() == ""
    assert warnings == []


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_other_replies_stay_text(case: str, size: int) -> None:
    text, problem = TEXTS[case]
    parts, warnings = read(*(text[at : at + size] for at in range(0, len(text), size)))
    assert parts == ([Text(text)] if text else [])
    assert len(warnings) == bool(problem or not text)
    wanted = "looks like a tool call" if text else "empty"
    assert all(problem in each and wanted in each for each in warnings)


def test_only_what_can_be_calls_is_held_back() -> None:
    for begun in ("The sum", "{x", '{"p', "[1", "[{]", "``a", "```py thon", "```\nx", "[]"):
        assert ReplyReader(TOOLS).add(begun).content == begun
    for begun in ("{", '[{"na', "``", "```json\n", '```\n[ {"arg', ADD, f"[{ADD}", f"{ADD} x"):
        assert ReplyReader(TOOLS).add(begun).content == ""


def test_calls_without_markers_follow_reasoning_only() -> None:
    parts, _ = read("<think>Hm.</think>\n\n", ADD)
    assert called(parts) == [ADDED]
    marked = f"<tool_call>\n{NOW}\n</tool_call>"
    parts, warnings = read(f"{ADD}\n{marked}")
    assert [type(part) for part in parts] == [Text, ToolCall]
    parts, warnings = read(f"{marked}\n{ADD}")
    assert [type(part) for part in parts] == [ToolCall, Text]
    assert warnings == []


def test_only_the_first_call_counts_if_calls_are_not_parallel() -> None:
    parts, _ = read(f"{ADD}\n{NOW}", parallel=False)
    assert called(parts) == [ADDED]


def test_a_call_without_markers_that_is_cut_off_is_invalid() -> None:
    (call,), (warning,) = read(f"```json\n{ADD[:-3]}", reason="length")
    assert isinstance(call, InvalidToolCall)
    assert call.is_cut
    assert "max_tokens" in warning


def test_calls_with_markers_of_unknown_tools_have_a_warning() -> None:
    parts, (warning,) = read('<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>')
    assert called(parts) == [("sub", {})]
    assert "there is no tool 'sub'. The tools are: add, now, größe" in warning
    _, (warning,) = read("<tool_call>\nadd!\n</tool_call>")
    assert "not valid: the call is not JSON" in warning


@pytest.mark.parametrize("cut", ["<tool", "<tool_call", "<tool_call>", "<tool_call>\n{", ADD[:20]])
def test_a_call_that_is_cut_off_leaves_no_marker_in_the_text(cut: str) -> None:
    parts, warnings = read("Well: ", cut, reason="length")
    if cut.startswith("<"):
        assert [type(part) for part in parts] == [Text, InvalidToolCall]
        assert parts[0] == Text("Well: ")
        assert "max_tokens" in warnings[0]
    parts, _ = read("Well: ", cut)
    assert ("".join(p.text for p in parts) == f"Well: {cut}") == ("<tool_call>" not in cut)


@pytest.mark.parametrize("tools", [TOOLS, ()])
@pytest.mark.parametrize("cut", ["<", "<t", "<too"])
def test_the_first_characters_of_a_marker_are_no_text_if_a_reply_is_cut(
    cut: str, tools: Any
) -> None:
    for reason, shown in (("length", ""), ("cancelled", ""), ("stop", cut)):
        reader = ReplyReader(tools, calls_forbidden=not tools)
        delta = reader.add(f"1 {cut}", finish_reason=reason)
        assert (delta.content, delta.warnings) == (f"1 {shown}", [])
    assert ReplyReader().add(f"1 {cut}", finish_reason="length").content == f"1 {cut}"


@given(st.sampled_from([text for text, _ in (*CALLS.values(), *TEXTS.values())]), st.data())
def test_nothing_is_lost_however_a_reply_is_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(*pieces) == read(text)
    start = data.draw(st.integers(0, len(text)))
    parts, _ = read(text[:start])
    if not called(parts):
        assert "".join(part.text for part in parts) == text[:start]
