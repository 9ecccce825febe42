"""Tools and schemas that constrain decoding: members that write something else cannot."""

from __future__ import annotations

import json
import re
import sys
from functools import reduce
from operator import add
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from adafuse_llm import GrammarError, MissingDependencyError
from langchain_adafuse import ChatAdaFuse, get_round_callback
from tests.support.instruction_follower import call
from tests.support.scripted import scripted_engine

pytest.importorskip("llguidance")


class City(BaseModel):
    """A city."""

    name: str
    people: int


@tool
def population(city: str) -> int:
    """How many people live in a city."""
    return {"Orrin": 1200, "Vell": 300}[city]


@tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


TOOLS = [population, multiply]
ARGUMENTS: dict[str, dict[str, type]] = {
    "population": {"city": str},
    "multiply": {"a": int, "b": int},
}
UNFIT = '{"name": "Orrin", "people": "many"}'


def chat_that(reply, **fields):
    script = reply if callable(reply) else lambda prompt: reply
    return ChatAdaFuse(engine=scripted_engine(script), **{"max_new_tokens": 80, **fields})


def check_calls(message):
    """Check that all calls of a message are valid; return the names of their tools."""
    assert not message.invalid_tool_calls
    for made in message.tool_calls:
        kinds = ARGUMENTS[made["name"]]
        assert made["args"].keys() == kinds.keys()
        assert all(type(value) is kinds[name] for name, value in made["args"].items())
    return [made["name"] for made in message.tool_calls]


# Structured output ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_a_reply_fits_the_schema_whatever_the_members_write(method):
    reply = UNFIT if method == "json_schema" else call("City", **json.loads(UNFIT))
    chat = chat_that(reply)
    structured = chat.with_structured_output(City, method=method)
    with get_round_callback() as rounds:
        city = structured.invoke("Which city?")
    assert city.name == "Orrin"
    assert len({each["run_id"] for each in rounds.rounds}) == 1
    assert await structured.ainvoke("Which city?") == city
    assert list(structured.stream("Which city?"))[-1] == city
    free = chat.with_structured_output(City, method=method, include_raw=True, enforce=False)
    assert "people" in str(free.invoke("Which city?")["parsing_error"])


class Expr(BaseModel):
    """An expression."""

    op: Literal["add", "multiply"]
    of: Expr | Literal[1, 2]


@tool
def evaluate(expr: Expr) -> str:
    """Evaluate an expression."""
    return type(expr.of).__name__


def test_a_class_that_contains_itself_is_enforced_at_every_depth():
    inner = {"op": "add", "of": {"op": "multiply", "of": "two"}}

    def that(reply):
        return chat_that(reply, enforce=True, max_new_tokens=200)

    calling = that(call("Expr", **inner)).with_structured_output(
        Expr, method="function_calling", strict=True
    )
    writing = that(json.dumps(inner)).with_structured_output(Expr)
    for structured in (calling, writing):
        expr = structured.invoke("Go")
        assert isinstance(expr.of, Expr)
        assert expr.of.of in (1, 2)
    chat = that(call("evaluate", expr=inner)).bind_tools([evaluate], tool_choice="any")
    (made,) = chat.invoke("Go").tool_calls
    assert evaluate.invoke(made["args"]) == "Expr"


# Tools ----------------------------------------------------------------------------------------

WRONG_TYPES = '<tool_call>\n{"name": "multiply", "arguments": {"a": "two", "c": 3}}\n</tool_call>'


async def test_a_call_can_be_required():
    chat = chat_that("Hello.").bind_tools(TOOLS, tool_choice="any")
    message = chat.invoke("Hi")
    names = check_calls(message)
    assert names
    assert message.content == ""
    assert check_calls(await chat.ainvoke("Hi")) == names


def test_a_tool_can_be_chosen():
    reply = call("population", city="Orrin") + "\n" + call("population", city="Vell")
    for choice in ("multiply", "population"):
        message = chat_that(reply).bind_tools(TOOLS, tool_choice=choice).invoke("Hi")
        assert check_calls(message) == [choice]
    assert message.tool_calls[0]["args"] == {"city": "Orrin"}
    forbidden = chat_that("Hello.").bind_tools(TOOLS, tool_choice="none").invoke("Hi")
    assert forbidden.content == "Hello."
    calling = chat_that(f"So:\n{reply}").bind_tools(TOOLS, tool_choice="none").invoke("Hi")
    assert calling.content.startswith("So:")
    assert "<tool_call>" not in calling.content


def test_parallel_calls_can_be_turned_off():
    reply = call("population", city="Orrin") + "\n" + call("population", city="Vell")
    chat = chat_that(reply, max_new_tokens=300)
    both = chat.bind_tools(TOOLS, tool_choice="any").invoke("Go")
    assert check_calls(both) == ["population", "population"]
    one = chat.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False).invoke("Go")
    assert check_calls(one) == ["population"]
    assert one.usage_metadata["output_tokens"] < both.usage_metadata["output_tokens"]


def test_calls_stream_and_stop_sequences_do_not_cut_them():
    calls = [call("population", city="</tool_call>\n"), call("multiply", a=2, b=3)]
    reply = "I look.\n" + "\n".join(calls)
    chat = chat_that(reply, stop=["}}"], max_new_tokens=300).bind_tools(TOOLS)
    chunks = list(chat.stream("Go"))
    emitted = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert [json.loads(piece["args"]) for piece in emitted] == [
        {"city": "</tool_call>\n"},
        {"a": 2, "b": 3},
    ]
    message: Any = reduce(add, chunks)
    assert check_calls(message) == ["population", "multiply"]
    assert message.response_metadata["finish_reason"] == "tool_calls"


# Agents ---------------------------------------------------------------------------------------


def asks_first(prompt):
    if '"content": "1200"' not in prompt:
        return call("population", city="Orrin")
    if '"name": "City"' in prompt:
        return call("City", name="Orrin", people=1200)
    return '{"name": "Orrin", "people": 1200}'


@pytest.mark.parametrize("strategy", [ProviderStrategy(City), ToolStrategy(City)])
def test_agents_call_tools_and_answer_in_a_schema(strategy):
    agent = create_agent(chat_that(asks_first), TOOLS, response_format=strategy)
    state = agent.invoke({"messages": [HumanMessage("Which city?")]})
    assert state["structured_response"] == City(name="Orrin", people=1200)
    results = [each.content for each in state["messages"] if isinstance(each, ToolMessage)]
    assert results[0] == "1200"


# What cannot be enforced ----------------------------------------------------------------------


class Odd(BaseModel):
    """A schema with a pattern that cannot be enforced."""

    name: str = Field(json_schema_extra={"pattern": "(?=O)"})


def test_a_schema_that_cannot_be_enforced_is_described_with_one_warning(caplog):
    method = "function_calling"
    chat = chat_that(call("Odd", name="Orrin"))
    structured = chat.with_structured_output(Odd, method=method)
    for _ in range(2):
        assert structured.invoke("Which?") == Odd(name="Orrin")
    (record,) = caplog.records
    assert "not enforced" in record.message
    assert re.search("look-?ahead", record.message)
    caplog.clear()
    assert chat.with_structured_output(Odd, method=method, enforce=False).invoke("Which?")
    assert not caplog.records
    with pytest.raises(GrammarError, match=r"look-?ahead"):
        chat.with_structured_output(Odd, method=method, enforce=True).invoke("Which?")


def test_without_the_extra_nothing_is_enforced(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    chat = chat_that(WRONG_TYPES)
    assert not chat.profile["structured_output"]
    assert chat.bind_tools(TOOLS).invoke("Go").tool_calls[0]["args"] == {"a": "two", "c": 3}
    assert "enforced" not in caplog.text
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[grammar\]"):
        chat.bind_tools(TOOLS, enforce=True).invoke("Go")
