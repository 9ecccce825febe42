"""Replies, read in parts while they grow."""

import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.utils.json import parse_partial_json

from adafuse_llm.adapters.reply import (
    CallPiece,
    InvalidToolCall,
    Part,
    Reasoning,
    ReplyReader,
    Text,
    ToolCall,
)
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
MARKED = f"<tool_call>\n{ADD}\n</tool_call>"

ADDED = ToolCall("add", {"a": 1, "b": 2})
TOLD = ToolCall("now", {})
SIZED = ToolCall("größe", {"of": '```[{"xé'})


LIMIT = {"length": "the limit of 9 tokens (max_new_tokens)"}


def read(
    *pieces: str, reason: str = "stop", tools: Any = TOOLS, **options: Any
) -> tuple[list[Any], list[str]]:
    """All parts of a reply, with neighbours of one kind joined, and its warnings."""
    reader = ReplyReader(tools, **{"as_text": False, **options})
    deltas = [reader.add(piece) for piece in pieces]
    end: Any = SimpleNamespace(finish_reason=reason, cut_by=LIMIT.get(reason, ""))
    deltas.append(reader.add("", end=end))
    parts: list[Any] = []
    names: list[str] = []
    arguments: list[str] = []
    for part in (part for delta in deltas for part in delta.parts):
        if isinstance(part, CallPiece):
            if part.name is not None:
                names.append(part.name)
                arguments.append("")
            assert part.number == len(names) - 1
            arguments[-1] += part.arguments
            continue
        if isinstance(part, ToolCall):
            assert (names[-1], json.loads(arguments[-1])) == (part.name, part.arguments)
        elif isinstance(part, InvalidToolCall):  # no client can complete it and run the tool
            with suppress(ValueError):
                assert parse_partial_json(arguments[-1]) is None
        if isinstance(part, (Text, Reasoning)) and parts and type(parts[-1]) is type(part):
            parts[-1] = type(part)(parts[-1].text + part.text)
        else:
            parts.append(part)
    assert not any(delta.warnings for delta in deltas[:-1])
    return parts, deltas[-1].warnings


def pieces_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def cut_at_random(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


# Markers --------------------------------------------------------------------------------------

WHOLE: dict[str, tuple[str, list[Part]]] = {
    "text, reasoning and a call": (
        f"\n<think>hm, <tool_call>?</think>\nSo:\n{MARKED}\n\n done",
        [Reasoning("hm, <tool_call>?"), Text("So:\n"), ADDED, Text("done")],
    ),
    "numbers": (
        ' 1\n<tool_call>{"name": "add", "arguments": {"a": 1.5, "b": 2}}</tool_call>',
        [Text(" 1\n"), ToolCall("add", {"a": 1.5, "b": 2})],
    ),
    "a call without markers before one with markers": (
        f"{ADD}\n{MARKED}",
        [Text(f"{ADD}\n"), ADDED],
    ),
    "a call without markers after one with markers": (f"{MARKED}\n{ADD}", [ADDED, Text(ADD)]),
    "reasoning after text is text": ("Write <think>x</think>.", [Text("Write <think>x</think>.")]),
    "reasoning after a call": (f"{MARKED}\n<think>x</think>", [ADDED, Reasoning("x")]),
    "a marker in a string": (
        '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>"}}</tool_call> x',
        [ToolCall("now", {"a": "</tool_call>"}), Text("x")],
    ),
    "half a character": (
        r'<tool_call>{"name": "now", "arguments": {"a": "\ud83d", "b": "\ud83d\ude42"}}',
        [ToolCall("now", {"a": "\ufffd", "b": "🙂"})],
    ),
    "no closing marker": (f"<tool_call>{ADD}", [ADDED]),
    "the beginning of a marker": ("a <tool_", [Text("a <tool_")]),
    "another order of keys": (NOW, [TOLD]),
    "several": (f"{ADD}\n{NOW}{SIZE}", [ADDED, TOLD, SIZED]),
    "a list": (f"[{ADD}, {NOW}]", [ADDED, TOLD]),
    "fenced": (f"```json\n{ADD}\n```", [ADDED]),
    "several fences": (f"```json\n{ADD}\n```\n```json\n{NOW}\n```", [ADDED, TOLD]),
    "after reasoning": (f"<think>Hm.</think>\n\n{ADD}", [Reasoning("Hm."), ADDED]),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_reply_is_read_in_parts(case: str) -> None:
    text, expected = WHOLE[case]
    for size in (1, 3, 1000):
        assert read(*pieces_of(text, size)) == (expected, [])


def test_calls_are_text_without_tools() -> None:
    assert read(f"<think>a</think>{MARKED}", tools=())[0] == [Reasoning("a"), Text(MARKED)]


def test_what_may_be_a_marker_is_held_back_and_nothing_else() -> None:
    reader = ReplyReader(TOOLS)
    assert reader.add("a <b> <tool_").parts == [Text("a <b> ")]
    assert reader.add("x <tool_call").parts == [Text("<tool_x ")]
    assert reader.add(f">{ADD}</tool_call").parts == []
    assert reader.add(">\n").parts[1:] == [ADDED]


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ("", None, "not JSON"),
        ('{"name": "add", "arguments": {"a": 1}', None, "not JSON"),
        ('[{"name": "add", "arguments": {}}]', None, '"name"'),
        ('{"name": 3, "arguments": {}}', None, '"name"'),
        ('{"name": "add"}', "add", '"arguments"'),
        ('{"name": "add", "arguments": "{}"}', "add", '"arguments"'),
        ('{"name": "add", "arguments": {"a": NaN}}', None, "NaN"),
        ('{"name": "add", "arguments": {"a": 1e400}}', None, "too large"),
        (f'{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}', None, "digits"),
        (f"{ADD} {NOW}", None, "not JSON"),
        ("[" * 100_000, None, "not JSON"),
    ],
)
def test_malformed_calls_are_told_and_never_repaired(
    text: str, name: str | None, error: str
) -> None:
    (part, other), (warning,) = read(f"<tool_call>{text}</tool_call>\n{MARKED}")
    assert isinstance(part, InvalidToolCall)
    assert (part.name, part.text) == (name, text)
    assert error in part.error
    assert part.error in warning
    assert other == ADDED


def test_malformed_calls_can_be_text() -> None:
    for written in ("<tool_call>add!</tool_call>", '<tool_call>{"name": "add"'):
        assert read(written, as_text=True)[0] == [Text(written)]
        assert not read(written, as_text=True, reason="length")[0] or "add!" in written


def test_only_the_first_call_counts_if_calls_are_not_parallel() -> None:
    for text in (f"{ADD}\n{NOW}", f"{MARKED}\n{MARKED}"):
        assert read(text, parallel=False)[0] == [ADDED]


def test_a_valid_call_of_no_tool_has_a_warning() -> None:
    for name in ("sub", "ADD"):
        parts, (warning,) = read(
            f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        )
        assert parts == [ToolCall(name, {})]
        assert repr(name) in warning
    _, (warning,) = read('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    assert "lacks the arguments b" in warning


# Calls without markers -----------------------------------------------------------------------

TEXTS = [
    ("The sum is 3.", ""),
    ('{"price": 3, "currency": "EUR"}', ""),
    ('{"name": "add"}', ""),
    ("```python\nprint(1)\n```", ""),
    ("", "empty"),
    ('{"name": "sub", "arguments": {}}', "there is no tool 'sub'"),
    ('{"name": "add", "arguments": {"a": 1}}', "lacks the arguments b"),
    ('{"name": "now", "arguments": {}, "x": 1}', "other keys"),
    ('{"name": "now", "arguments": {"a": 1 + 2, "b": 7}}', "JSON"),
    (f"{ADD}\nThis adds the numbers.", "JSON"),
    (f"Sure: {ADD}", "JSON"),
    (f'{ADD}\n{{"name": "sub", "arguments": {{}}}}', "no tool 'sub'"),
    (f'{ADD}\n{{"sum": 3}}', "name"),
    (f"[{ADD}, {NOW}", "JSON"),
]


@pytest.mark.parametrize(("text", "problem"), TEXTS)
def test_other_replies_stay_text(text: str, problem: str) -> None:
    for size in (1, 1000):
        parts, warnings = read(*pieces_of(text, size))
        assert parts == ([Text(text)] if text else [])
        assert len(warnings) == bool(problem)
        assert all(problem in each for each in warnings)


def test_only_what_can_be_calls_is_held_back() -> None:
    for begun in (
        "The sum",
        '{"price": 3, "currency": "EUR", "x"',
        "```python\nimport sys\nprint(sys.a",
    ):
        assert ReplyReader(TOOLS).add(begun).content == begun
    for begun in ("{", '[{"na', "``", "```json\n", '```\n[ {"arg', ADD, f"[{ADD}", f"{ADD} x"):
        assert ReplyReader(TOOLS).add(begun).content == ""


# Replies that are cut ------------------------------------------------------------------------


@pytest.mark.parametrize("begun", ["<tool_call>", "<tool_call>\n{", f"<tool_call>{ADD[:-3]}"])
def test_a_call_that_is_cut_off_is_invalid_and_whole_calls_before_it_stay(begun: str) -> None:
    for text, before in ((begun, []), (f"{MARKED}\n{begun}", [ADDED])):
        parts, (warning,) = read(text, reason="length")
        assert parts[:-1] == before
        assert isinstance(parts[-1], InvalidToolCall)
        assert parts[-1].is_cut
        assert "9 tokens (max_tokens)" in warning
    (part,), _ = read(f"```json\n{ADD[:-3]}", reason="length")
    assert isinstance(part, InvalidToolCall)
    assert part.is_cut


@pytest.mark.parametrize("begun", ["<", "<tool_call"])
def test_the_beginning_of_a_marker_is_no_text_if_a_reply_is_cut(begun: str) -> None:
    ended = [("length", ""), ("cancelled", ""), ("stop", begun)]
    for reason, shown in ended:
        (text, *calls), _ = read(f"1 {begun}", reason=reason)
        assert text == Text(f"1 {shown}")
        assert [each.is_cut for each in calls] == [True] * (begun[:5] == "<tool" and not shown)
    for text in (f"1 {begun}", "<"):
        assert read(text, reason="length", tools=())[0] == [Text(text)]


def test_a_call_whose_json_is_whole_needs_no_marker_if_a_reply_is_cut() -> None:
    for begun in (f"<tool_call>{ADD}", f"<tool_call>{ADD}</tool"):
        assert read(begun, reason="length")[0] == [ADDED]


def test_a_call_runs_once_in_a_reply() -> None:
    other = MARKED.replace("2", "3")
    parts, (warning,) = read(f"{MARKED}\n{other}\n{MARKED}\n<tool_call>{NOW}</tool_call>")
    assert parts == [ADDED, ToolCall("add", {"a": 1, "b": 3})]
    assert "repeats" in warning
    assert read(MARKED + MARKED.replace("1", "true"))[0] == [
        ADDED,
        ToolCall("add", {"a": True, "b": 2}),
    ]
    assert "9 tokens" in read(MARKED, reason="length")[1][0]


# Calls in pieces -----------------------------------------------------------------------------


def written(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'now', 'arguments': arguments})}\n</tool_call>"


def test_a_call_comes_in_pieces_as_far_as_it_is_certain() -> None:
    reader = ReplyReader(TOOLS, in_pieces=True)
    for text, passed_on in (
        ('<tool_call>\n{"name": "now", "arguments": ', None),
        ('{"a"', "{"),
        (': "f\\u00f', '"a": "f'),
        ("6x\\ud83d", "öx"),
        ('\\ude42", "b": -12', "🙂"),
        ('.5, "c": tru', '", "b": -12.5'),
        ('e, "d": [{"e": {}', ', "c": true, "d": [{"e": {'),
        ("}]}}\n</tool", None),
        ("_call>", "}}]}"),
    ):
        pieces = [part for part in reader.add(text).parts if isinstance(part, CallPiece)]
        name = "now" if passed_on == "{" else None
        assert pieces == ([] if passed_on is None else [CallPiece(0, name, passed_on)])


def test_a_call_that_may_become_an_earlier_one_is_held_back_until_it_differs() -> None:
    reader = ReplyReader(TOOLS, in_pieces=True)
    reader.add(written(a="Vell", b=1) + written(b=2))
    for text, passed_on in (
        ('<tool_call>{"name": "now", "arguments": {"a": "Ve', []),
        ("ra", [CallPiece(2, "now", '{"a": "Vera')]),
        ('"}}</tool_call><tool_call>{"name": "x", "arguments": {', [CallPiece(3, "x", "{")]),
    ):
        assert reader.add(text).parts[-1:] == passed_on
    parts, (warning,) = read(*written(a="Vell"), *written(a="Vell"), in_pieces=True)
    assert (parts, "repeats" in warning) == ([ToolCall("now", {"a": "Vell"})], True)


@pytest.mark.parametrize("as_text", [True, False])
def test_a_call_is_valid_only_if_all_of_it_was_written(as_text: bool) -> None:
    whole = written(a=["x ]}", {"b": [2, '"']}], c="\\", d={"e": None})
    size = whole.rindex("}") + 1
    for end in range(len("<tool_call>"), len(whole)):
        parts, (warning,) = read(*whole[:end], reason="length", in_pieces=True, as_text=as_text)
        is_valid = [isinstance(part, ToolCall) for part in parts]
        assert is_valid in ([end >= size], [False] * (not as_text), [False])
        assert "9 tokens" in warning
    # a grammar permits these arguments, but they are no JSON or have a key twice
    for arguments in ('{"a": 1e999, "b": 2}', '{"a": "x", "b": 1, "a": "y"}'):
        call = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
        (part,), _ = read(*call, in_pieces=True)
        assert isinstance(part, InvalidToolCall)


# Pieces --------------------------------------------------------------------------------------

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
REPLIES = st.lists(
    st.sampled_from([*MARKERS, ADD, "<", "</", "<tool", "text", " ", "\n", "\U0001f600"]),
    max_size=12,
).map("".join)
EXAMPLES = st.sampled_from([*(text for text, _ in WHOLE.values()), *(text for text, _ in TEXTS)])


@given(REPLIES | EXAMPLES, st.data(), st.sampled_from([TOOLS, ()]), st.booleans())
def test_the_parts_do_not_depend_on_how_a_reply_is_cut(
    reply: str, data: st.DataObject, tools: Any, in_pieces: bool
) -> None:
    cut = read(*cut_at_random(reply, data), tools=tools, in_pieces=in_pieces)
    assert cut == read(reply, tools=tools)


@given(st.sampled_from([text for text, _ in TEXTS]), st.data())
def test_nothing_of_a_text_is_lost_wherever_it_ends(text: str, data: st.DataObject) -> None:
    text = text[: data.draw(st.integers(0, len(text)))]
    parts, _ = read(*cut_at_random(text, data))
    if not any(isinstance(part, ToolCall) for part in parts):
        assert "".join(part.text for part in parts) == text
