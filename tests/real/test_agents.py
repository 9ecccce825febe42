"""Agents of LangChain finish an errand with real members and two tools.

Qwen2.5-Coder-0.5B calls tools again and again, also when the errand is done. So the last tool ends
the errand: its result is the answer (`return_direct`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from adafuse_llm import AdaFuseEngine
from langchain_adafuse import ChatAdaFuse

pytestmark = pytest.mark.real

Engines = Callable[..., AdaFuseEngine]

ERRAND = "What is the unit price of a bolt? Then multiply it by 3."
STEPS = [("unit_price", {"item": "bolt"}), ("multiply", {"a": 4, "b": 3})]


def unit_price(item: str) -> str:
    """Return the unit price of an item, in euros."""
    return {"bolt": "4", "nut": "7"}[item.strip().lower()]


def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return f"{a * b:g}"


@pytest.mark.parametrize("names", [("qwen",), ("smollm", "qwen")], ids="+".join)
def test_a_langchain_agent_finishes_an_errand(real_engine: Engines, names: Any) -> None:
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
