"""The embedded members as agents of LangChain and LangGraph, with real tools, end to end."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from adafuse_llm.embedded.tools import calculate, look_up
from langchain_adafuse import ChatAdaFuse

pytestmark = pytest.mark.disable_socket

TOOLS = [look_up, calculate]

MILL = ("look_up", {"query": "Silesse Mill"})

ERRANDS = [
    ("Who is the director of the Silesse Mill?", [MILL], "Poris Wentano"),
    ("What is 417 * 38?", [("calculate", {"expression": "417 * 38"})], "15846"),
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


def graph_of(chat, tools):
    """The loop of an agent, written out."""
    bound = chat.bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "model")
    return graph.compile()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("make", [create_agent, graph_of])
@pytest.mark.parametrize(("question", "calls", "answer"), ERRANDS)
def test_the_members_call_the_tools_that_lead_to_the_answer(
    embedded, make, question, calls, answer
):
    state = make(embedded, TOOLS).invoke({"messages": [("user", question)]})
    made = [call for each in state["messages"] for call in getattr(each, "tool_calls", [])]
    assert [(call["name"], call["args"]) for call in made] == calls
    assert state["messages"][-1].text == answer


def test_the_members_know_what_was_said_before(embedded):
    agent: Any = create_agent(embedded, TOOLS)
    state = agent.invoke({"messages": [("user", "Who is the director of the Silesse Mill?")]})
    again = agent.invoke({"messages": [*state["messages"], ("user", "What is 417 * 38?")]})
    assert again["messages"][-1].text == "15846"
    assert again["messages"][: len(state["messages"])] == state["messages"]
