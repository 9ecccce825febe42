"""The embedded members as agents of LangChain and LangGraph, with real tools, end to end."""

from typing import Any

import pytest
from langchain.agents import create_agent

from adafuse_llm.embedded.tools import calculate, look_up
from langchain_adafuse import ChatAdaFuse

pytestmark = pytest.mark.disable_socket


def test_the_members_call_the_tools_that_lead_to_the_answer():
    chat = ChatAdaFuse.from_embedded(max_new_tokens=160)
    agent: Any = create_agent(chat, [look_up, calculate])
    question = "How much do 3 tickets for the Silesse Mill cost?"
    state = agent.invoke({"messages": [("user", question)]})
    made = [call for each in state["messages"] for call in getattr(each, "tool_calls", [])]
    assert [(call["name"], call["args"]) for call in made] == [
        ("look_up", {"query": "Silesse Mill"}),
        ("calculate", {"expression": "3 * 19.88"}),
    ]
    assert state["messages"][-1].text == "59.64 crowns"
    chat.unload()
