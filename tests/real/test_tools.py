"""Tool calls and agents of real members, in LangChain."""

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from adafuse_llm import AdaFuseEngine
from langchain_adafuse import ChatAdaFuse

pytestmark = pytest.mark.real

Engines = Callable[..., AdaFuseEngine]

QUESTION = "What is the unit price of a bolt?"
ERRAND = f"{QUESTION} Then multiply it by 3."
STEPS = [("unit_price", {"item": "bolt"}), ("multiply", {"a": 4, "b": 3})]
TEAMS = pytest.mark.parametrize("names", [("qwen",), ("smollm", "qwen")], ids="+".join)


def unit_price(item: str) -> str:
    """Return the unit price of an item, in euros."""
    return {"bolt": "4", "nut": "7"}.get(item.strip().lower(), "5")


def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return f"{a * b:g}"


TOOLS: dict[str, Callable[..., str]] = {"unit_price": unit_price, "multiply": multiply}


@TEAMS
@pytest.mark.parametrize("choice", ["auto", "required", "unit_price"])
def test_calls_name_a_tool_that_accepts_their_arguments(
    real_engine: Engines, names: Any, choice: str
) -> None:
    """Qwen2.5-Coder alone writes bare JSON by itself, which the grammar permits as free text."""
    chat = ChatAdaFuse(engine=real_engine(*names), max_new_tokens=64)
    bound = chat.bind_tools([*TOOLS.values()], tool_choice=choice)
    for message in (bound.invoke(QUESTION), reduce(add, list(bound.stream(QUESTION)))):
        assert message.tool_calls or (choice == "auto" and len(names) > 1)
        for call in message.tool_calls:
            assert TOOLS[call["name"]](**call["args"])
        assert '"arguments"' not in message.text
        assert "<tool_call" not in message.text


@TEAMS
def test_an_agent_finishes_an_errand(real_engine: Engines, names: Any) -> None:
    """The result of the last tool is the answer, because Qwen 0.5B would call it again."""
    chat = ChatAdaFuse(engine=real_engine(*names), max_new_tokens=100)
    agent = create_agent(chat, [unit_price, tool(multiply, return_direct=True)])
    state = agent.invoke({"messages": [HumanMessage(ERRAND)]}, {"recursion_limit": 9})
    calls = [
        (call["name"], call["args"])
        for message in state["messages"]
        for call in getattr(message, "tool_calls", ())
    ]
    assert calls == STEPS
    assert "12" in state["messages"][-1].text
