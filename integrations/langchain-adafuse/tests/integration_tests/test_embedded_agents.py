"""The embedded members as agents of LangChain and LangGraph, with real tools, end to end."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent

from adafuse_llm.embedded.tools import calculate, look_up
from langchain_adafuse import ChatAdaFuse

pytestmark = pytest.mark.disable_socket

TOOLS = [look_up, calculate]

MILL = ("look_up", {"query": "Silesse Mill"})

ERRANDS = [
    ("Who is the director of the Silesse Mill?", [MILL], "Poris Wentano"),
    (
        "How much do 3 tickets for the Silesse Mill cost?",
        [MILL, ("calculate", {"expression": "3 * 19.88"})],
        "59.64 crowns",
    ),
    ("Hello.", [], "Hello. What would you like to know?"),
]


@pytest.fixture(scope="module")
def embedded():
    chat = ChatAdaFuse.from_embedded(max_new_tokens=160)
    yield chat
    chat.unload()


@pytest.mark.parametrize(("question", "calls", "answer"), ERRANDS)
def test_the_members_call_the_tools_that_lead_to_the_answer(embedded, question, calls, answer):
    agent: Any = create_agent(embedded, TOOLS)
    state = agent.invoke({"messages": [("user", question)]})
    made = [call for each in state["messages"] for call in getattr(each, "tool_calls", [])]
    assert [(call["name"], call["args"]) for call in made] == calls
    assert state["messages"][-1].text == answer
