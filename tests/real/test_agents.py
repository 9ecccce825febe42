"""Agents of real members with the components of LangChain: what runs, and how often."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from adafuse_llm import AdaFuseEngine
from langchain_adafuse import ChatAdaFuse

pytestmark = pytest.mark.real

Engines = Callable[..., AdaFuseEngine]


def unit_price(item: str) -> str:
    """Return the unit price of an item, in euros."""
    return {"bolt": "4", "nut": "7"}.get(item.strip().lower(), "5")


def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return f"{a * b:g}"


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"It rains in {city}, at 12 degrees."


def count_stock(item: str) -> str:
    """Return how many pieces of an item are in stock."""
    return f"4711 {item}"


TOOLS = (unit_price, multiply, get_weather, count_stock)


class Stock(BaseModel):
    item: str
    count: int


def test_an_agent_finishes_an_errand(real_engine: Engines) -> None:
    """The result of the last tool is the answer, because Qwen 0.5B would call it again."""
    chat = ChatAdaFuse(engine=real_engine("qwen"), max_new_tokens=100)
    agent = create_agent(chat, [unit_price, tool(multiply, return_direct=True)])
    asked = HumanMessage("What is the unit price of a bolt? Then multiply it by 3.")
    state = agent.invoke({"messages": [asked]}, {"recursion_limit": 9})
    calls = [call for each in state["messages"] for call in getattr(each, "tool_calls", ())]
    assert [call["name"] for call in calls] == ["unit_price", "multiply"]
    assert "12" in state["messages"][-1].text


@pytest.mark.parametrize("question", ["What is the weather in Oslo?", "How many nuts are there?"])
def test_no_reply_calls_a_tool_twice_and_no_empty_answer_is_silent(
    real_engine: Engines, question: str
) -> None:
    chat = ChatAdaFuse(engine=real_engine("smollm", "qwen"), max_new_tokens=200)
    agent: Any = create_agent(chat, list(TOOLS))
    state: Any = {}
    config = {"recursion_limit": 8}
    for state in agent.stream({"messages": [HumanMessage(question)]}, config, stream_mode="values"):
        replies = [each for each in state["messages"] if isinstance(each, AIMessage)]
        if len(replies) == 3:
            break
    for reply in replies:
        calls = [(call["name"], str(call["args"])) for call in reply.tool_calls]
        assert len({*calls}) == len(calls)
        assert reply.text or calls or reply.response_metadata["adafuse_warnings"]


def test_an_agent_with_a_response_format_calls_the_tool_before_it_writes_the_object(
    real_engine: Engines,
) -> None:
    chat = ChatAdaFuse(engine=real_engine("smollm", "qwen"))
    agent: Any = create_agent(chat, [count_stock], response_format=Stock)
    state = agent.invoke({"messages": "How many bolts are in stock?"}, {"recursion_limit": 12})
    assert state["structured_response"].count == 4711
