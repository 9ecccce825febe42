"""Grammars of tool calls, followed byte by byte."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from adafuse_llm import GrammarError
from adafuse_llm.adapters.reply import ReplyReader, ToolCall
from adafuse_llm.adapters.schema import close_objects
from adafuse_llm.adapters.tool_grammar import tool_grammar
from adafuse_llm.grammar.matchers import byte_tokenizer
from adafuse_llm.text.conversation import Tool

llguidance = pytest.importorskip("llguidance")

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = Tool("add", "Add.", {"type": "object", "properties": NUMBERS, "required": ["a", "b"]})
SAY = Tool(
    "add_text",
    "Say a text.",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)
NOW = Tool("now", "Tell the time.", {"title": "Now", "description": "The time."})
TOOLS = (ADD, SAY, NOW)

A_SUM = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2}}\n</tool_call>'
A_TEXT = '<tool_call>\n{"name": "add_text", "arguments": {"text": "x"}}\n</tool_call>'
A_MARKER = A_TEXT.replace('"x"', json.dumps('an </tool_call>, then "quote\\" </tool_call>\n'))
A_TIME = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def matcher(grammar):
    follower = llguidance.LLMatcher(byte_tokenizer(), grammar)
    assert not follower.is_error(), follower.get_error()
    return follower


def accepts(grammar: str, text: str) -> bool:
    follower = matcher(grammar)
    data = list(text.encode())
    return follower.try_consume_tokens(data) == len(data) and follower.is_accepting()


@pytest.mark.parametrize(
    ("options", "allowed", "forbidden"),
    [
        (
            {},
            (
                "",
                "Four.",
                "a <b> <tool_cal",
                A_SUM,
                f"So:\n{A_SUM}\n{A_TEXT}\n{A_TIME}",
                "<think>never closed, <tool_call>, <think>",
                f"<think>so <tool_call>!\n</think>\n\n{A_SUM}",
                "<think>a</think> <think>b</think>\nFour.",
                f"Not first: <think>{A_SUM}",
                "ä\U0001f600",
            ),
            (
                " Four.",  # each member may write a space before the reply, which is no part of it
                "<tool_call>add",
                "not </tool_call> yet",
                f"{A_SUM} done",
                f"{A_SUM}{A_TIME}",
                A_SUM.replace("add", "subtract"),
                A_SUM.replace("1", '"1"'),
                A_SUM.replace('"a": 1, ', ""),
                A_SUM.replace("-2", '-2, "c": 3'),
                A_SUM.replace('{"name"', '{ "name"'),
                A_TIME.replace("{}", '{"zone": 1}'),
                "<think>a</think><tool_call>add",
            ),
        ),
        (
            {"choice": "required"},
            (A_TIME, f"{A_TIME}\n{A_SUM}", f"{A_MARKER}\n{A_SUM}"),
            ("", "Four.", f"So: {A_SUM}", f"<think></think>{A_SUM}"),
        ),
        (
            {"choice": "add"},
            (A_SUM,),
            (A_TEXT, A_TIME, f"{A_SUM}\n{A_SUM}", "", f"So: {A_SUM}"),
        ),
        ({"parallel": False}, ("Four.", A_SUM), (f"{A_SUM}\n", f"{A_SUM}\n{A_SUM}")),
        ({"choice": "required", "parallel": False}, (A_SUM,), (f"{A_SUM}\n{A_SUM}", "")),
        (
            {"reply": {"type": "object", "properties": NUMBERS}},
            ('{"a": 1}', A_SUM, f"{A_SUM}\n{A_TIME}"),
            ("", "Four.", '{"c": 1}', f'{{"a": 1}}\n{A_SUM}'),
        ),
    ],
)
def test_the_choice_says_what_a_reply_can_be(options, allowed, forbidden):
    grammar = tool_grammar(TOOLS, **options)
    assert [reply for reply in (*allowed, *forbidden) if accepts(grammar, reply)] == [*allowed]


@pytest.mark.parametrize("choice", ["auto", "required", "add"])
def test_random_bytes_that_the_grammar_allows_parse_as_calls(choice):
    """Walks prefer the bytes of a call; each ends where the grammar accepts."""
    rng = random.Random(choice)
    kinds = {"add": {"a": int, "b": int}, "add_text": {"text": str}, "now": {}}
    found = 0
    for _ in range(20):
        follower = matcher(tool_grammar(TOOLS, choice=choice))
        reply = b"Hi <tool_call>" if choice == "auto" else b""
        assert follower.try_consume_tokens(list(reply)) == len(reply)
        while not (follower.is_accepting() and rng.random() < 0.5) and len(reply) < 5000:
            mask = follower.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1]
            if not allowed:
                break
            likely = [byte for byte in allowed if byte in b'"}]0123456789'] or allowed
            byte = rng.choice(likely if rng.random() < 0.8 else allowed)
            assert follower.consume_token(byte)
            reply += bytes([byte])
        end: Any = SimpleNamespace(finish_reason="stop", cut_by="")
        reader = ReplyReader(TOOLS, in_pieces=True)
        calls = [call for letter in reply.decode() for call in reader.add(letter).calls]
        calls += reader.add("", end=end).calls
        assert len(calls) == 1 or choice != "add"
        for call in calls:
            assert isinstance(call, ToolCall), reply
            given = {name: type(value) for name, value in call.arguments.items()}
            assert given == kinds[call.name]
            found += 1
    assert found >= 20


def test_a_schema_that_cannot_be_enforced_is_refused_with_the_tool_and_the_reason():
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    with pytest.raises(GrammarError, match=r"^.*'odd'.*not.*$") as error:
        tool_grammar([ADD, Tool("odd", "", parameters)])
    assert "\n" not in str(error.value)


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("bad", "allowed", "forbidden"),
    [
        ({**TEXT, "pattern": "(?=a)b"}, '"x"', "1"),
        ({"type": "array", "items": TEXT, "uniqueItems": True}, '["x"]', '"x"'),
        ({**TEXT, "not": {"const": "x"}}, '"x"', "1"),
        ({"enum": []}, "1", "x"),
        ({**TEXT, "minLength": 5, "maxLength": 1}, "1", "x"),
        ({"$ref": "#/nowhere"}, "1", "x"),
        ({"type": "object", "properties": {"enum": {"type": "any"}}}, '{"enum": 1}', "1"),
        ({"anyOf": [{"type": "number", "multipleOf": 0.01}, {"type": "null"}]}, "0.5", '"x"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "0.5", '"x"'),
        ({"type": [{"type": "string"}]}, "1", "x"),
        (
            {"type": "object", "patternProperties": {"^(?!x)": {}}, "additionalProperties": False},
            '{"a": 1}',
            "1",
        ),
    ],
)
def test_a_part_that_cannot_be_enforced_loosens_only_itself(
    bad: Any, allowed: str, forbidden: str
) -> None:
    properties = {"bad": bad, "good": TEXT}
    odd = Tool("odd", "", {"type": "object", "properties": properties, "required": ["bad"]})
    problems: list[str] = []
    grammar = tool_grammar([ADD, odd], choice="required", problems=problems)
    (problem,) = problems
    assert "'odd'" in problem
    call = '<tool_call>\n{"name": "%s", "arguments": {"bad": %s, "good": %s}}\n</tool_call>'
    assert accepts(grammar, A_SUM)
    assert accepts(grammar, call % ("odd", allowed, '"x"'))
    assert not accepts(grammar, call % ("odd", forbidden, '"x"'))
    assert not accepts(grammar, call % ("odd", allowed, "1"))
    assert not accepts(grammar, call % ("none", allowed, '"x"'))


def test_a_keyword_that_is_null_or_an_empty_map_that_is_a_list_says_nothing() -> None:
    inner: Any = {"a": {**TEXT, "enum": None, "properties": []}}
    odd = {"type": "object", "properties": inner, "required": None, "$defs": None}
    reply = '<tool_call>\n{"name": "odd", "arguments": {"a": "b"}}\n</tool_call>'
    assert accepts(tool_grammar([Tool("odd", "", odd)], choice="odd"), reply)
    parameters: list[Any] = [{"properties": []}, {}]
    closed = close_objects({"properties": inner, "additionalProperties": None, "anyOf": None})
    assert closed["additionalProperties"] is False
    none, empty = (tool_grammar([Tool("now", "", each)]) for each in parameters)
    assert none == empty


def test_arguments_are_always_an_object():
    with pytest.raises(GrammarError, match=r"'odd'.*'array'"):
        tool_grammar([Tool("odd", "", {"type": "array"})])
    assert tool_grammar([Tool("odd", "", {"type": ["object", "null"]})])
    without = tool_grammar([Tool("now", "", {})], choice="now")
    assert accepts(without, A_TIME)
    assert not accepts(without, A_TIME.replace("{}", '{"zone": 1}'))
    reference = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "null"}}}}}
    grammar = tool_grammar([Tool("odd", "", reference)], choice="odd")
    reply = '<tool_call>\n{"name": "odd", "arguments": %s}\n</tool_call>'
    assert accepts(grammar, reply % '{"a": null}')
    assert not accepts(grammar, reply % "[]")


def test_names_of_tools_can_have_any_characters():
    odd = Tool('é"\\/}%json {\n', "", {})
    name = json.dumps(odd.name, ensure_ascii=False)
    reply = f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>'
    assert accepts(tool_grammar([odd], choice="required"), reply)


def test_objects_are_closed_unless_their_schema_says_otherwise():
    inner: dict[str, Any] = {"type": "object", "properties": {"x": {"const": {"properties": {}}}}}
    schema: dict[str, Any] = {
        "properties": {"properties": inner, "open": {**inner, "additionalProperties": True}},
        "$defs": {"items": {"type": "array", "items": inner}, "any": {"type": "object"}},
    }
    closed_inner = {**inner, "additionalProperties": False}
    assert close_objects(schema) == {
        "properties": {"properties": closed_inner, "open": schema["properties"]["open"]},
        "$defs": {"items": {"type": "array", "items": closed_inner}, "any": {"type": "object"}},
        "additionalProperties": False,
    }
    combined = {"allOf": [inner, {"properties": {"y": {}}, "required": ["y"]}]}
    assert close_objects(combined) == combined
    assert close_objects({**inner, "$ref": "#"}) == {**inner, "$ref": "#"}
    assert close_objects({"allOf": [inner]}) == {"allOf": [closed_inner]}
    assert close_objects({**inner, "required": ["z"]}) == {**inner, "required": ["z"]}
