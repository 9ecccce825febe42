"""Replies that are the JSON of tool calls without markers, in the frameworks and the server."""

from __future__ import annotations

import json
from functools import reduce
from operator import add as joined
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import InvalidInputError
from adafuse_llm.adapters.reply_form import to_tool_choice
from adafuse_llm.serving import create_app
from langchain_adafuse import ChatAdaFuse
from tests.support.scripted import scripted_engine
from tests.support.serving import served

CALL = '{"name": "add", "arguments": {"a": 12, "b": 7}}'
ARGUMENTS = {"a": 12, "b": 7}
QUESTION = "What is 12 plus 7?"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA},
}

ASKED: dict[str, Any] = {
    "model": "adafuse",
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": [TOOL],
}


def replying(reply: str) -> Any:
    """An engine whose members write `reply`, and the answer after a result."""
    return scripted_engine(
        lambda prompt: "It is 19." if '<tool_response>\n{"name"' in prompt else reply
    )


def test_bare_calls_are_calls_in_langchain() -> None:
    with replying(f"```json\n{CALL}\n```") as engine:
        chat = ChatAdaFuse(engine=engine)
        bound = chat.bind_tools([add])
        for message in (bound.invoke(QUESTION), reduce(joined, list(bound.stream(QUESTION)))):
            assert [call["args"] for call in message.tool_calls] == [ARGUMENTS]
            assert message.content == ""
            assert message.response_metadata["finish_reason"] == "tool_calls"
            assert "adafuse_warnings" not in message.response_metadata
        state = create_agent(chat, [add]).invoke({"messages": [HumanMessage(QUESTION)]})
        assert [m.type for m in state["messages"]] == ["human", "ai", "tool", "ai"]
        assert state["messages"][-1].content == "It is 19."


async def test_bare_calls_are_calls_in_llama_index() -> None:
    with replying(f"[{CALL}, {CALL}]") as engine:
        llm = AdaFuseLLM(engine=engine)
        asked: dict[str, Any] = {
            "tools": [FunctionTool.from_defaults(add)],
            "user_msg": QUESTION,
            "allow_parallel_tool_calls": True,
        }
        *_, last = llm.stream_chat_with_tools(**asked)
        for response in (llm.chat_with_tools(**asked), last):
            calls = llm.get_tool_calls_from_response(response)
            assert [call.tool_kwargs for call in calls] == [ARGUMENTS] * 2
            assert not response.message.content
            assert "adafuse_warnings" not in response.additional_kwargs
        agent = FunctionAgent(llm=llm, tools=[add])
        assert str(await agent.run(QUESTION)) == "It is 19."


def test_bare_calls_are_calls_on_the_server() -> None:
    with replying(CALL) as engine, served(create_app(engine)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        (choice,) = client.chat.completions.create(**ASKED).choices
        calls = choice.message.tool_calls or []
        assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        parts = [part.choices[0] for part in client.chat.completions.create(**ASKED, stream=True)]
        calls = [call for part in parts for call in part.delta.tool_calls or ()]
        assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS]
        assert not any(part.delta.content for part in parts)
        assert parts[-1].finish_reason == "tool_calls"


def test_what_looks_like_a_call_has_a_warning() -> None:
    with replying(CALL.replace("add", "sum")) as engine:
        bound = ChatAdaFuse(engine=engine).bind_tools([add])
        for message in (bound.invoke(QUESTION), reduce(joined, list(bound.stream(QUESTION)))):
            (warning,) = message.response_metadata["adafuse_warnings"]
            assert "'sum'" in warning
        llm = AdaFuseLLM(engine=engine)
        tools = ([FunctionTool.from_defaults(add)], QUESTION)
        *_, last = llm.stream_chat_with_tools(*tools)
        for response in (llm.chat_with_tools(*tools), last):
            assert response.additional_kwargs["adafuse_warnings"] == [warning]
        with served(create_app(engine)) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            *_, end = client.chat.completions.create(**ASKED, stream=True)
            for answer in (client.chat.completions.create(**ASKED), end):
                assert (answer.model_extra or {})["adafuse"]["warnings"] == [warning]


@pytest.mark.parametrize(
    ("choice", "names", "resolved"),
    [
        (None, ["add"], "auto"),
        (True, ["add"], "required"),
        (False, ["add"], "none"),
        ("any", ["add"], "required"),
        ("any", ["add", "any"], "any"),
        ({"type": "function", "function": {"name": "any"}}, ["any"], "any"),
        ({"type": "any"}, ["add"], "required"),
        ({"type": "tool", "name": "add"}, ["add"], "add"),
    ],
)
def test_a_tool_choice_is_read_in_all_its_forms(
    choice: Any, names: list[str], resolved: str
) -> None:
    assert to_tool_choice(choice, names) == resolved
    assert to_tool_choice(to_tool_choice(choice, names), names) == resolved
    with pytest.raises(InvalidInputError, match="tool_choice"):
        to_tool_choice("sub", names)
