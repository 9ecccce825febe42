"""Tool calls of real members, in LangChain, LlamaIndex and the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest
from llama_index.core.tools import FunctionTool
from llama_index.llms.adafuse import AdaFuseLLM
from llama_index.llms.adafuse._calls import selections
from starlette.testclient import TestClient

from adafuse_llm import AdaFuseEngine
from adafuse_llm.serving import create_app
from langchain_adafuse import ChatAdaFuse

pytestmark = pytest.mark.real

Engines = Callable[..., AdaFuseEngine]

QUESTION = "What is the unit price of a bolt?"
MEMBERS = [("qwen",), ("smollm", "qwen")]
CHOICES = ("required", "unit_price")
TOKENS = 64


def unit_price(item: str) -> str:
    """Return the unit price of an item, in euros."""
    return "4"


def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return f"{a * b:g}"


FUNCTIONS: dict[str, Callable[..., str]] = {"unit_price": unit_price, "multiply": multiply}
LLAMA_TOOLS = [FunctionTool.from_defaults(function) for function in FUNCTIONS.values()]
OPENAI_TOOLS = [tool.metadata.to_openai_tool() for tool in LLAMA_TOOLS]


def check_call(name: str, arguments: dict[str, Any]) -> None:
    """Check that a call names a tool and that the tool accepts its arguments."""
    assert FUNCTIONS[name](**arguments)


def check_no_call(text: str) -> None:
    """Check that a text for the user is not the JSON or the marker of a call."""
    assert '"arguments"' not in text
    assert "<tool_call" not in text


def langchain_replies(engine: AdaFuseEngine, choice: str) -> list[Any]:
    bound = ChatAdaFuse(engine=engine, max_new_tokens=TOKENS).bind_tools(
        list(FUNCTIONS.values()), tool_choice=choice
    )
    return [bound.invoke(QUESTION), reduce(add, list(bound.stream(QUESTION)))]


def llama_index_replies(engine: AdaFuseEngine, choice: str) -> list[Any]:
    llm = AdaFuseLLM(engine=engine, max_new_tokens=TOKENS)
    asked: dict[str, Any] = {"tool_choice": choice, "allow_parallel_tool_calls": True}
    *_, last = llm.stream_chat_with_tools(LLAMA_TOOLS, QUESTION, **asked)
    return [llm.chat_with_tools(LLAMA_TOOLS, QUESTION, **asked), last]


def server_replies(engine: AdaFuseEngine, choice: str) -> list[dict[str, Any]]:
    """The messages of a response and of a stream."""
    body = {
        "model": "adafuse",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": OPENAI_TOOLS,
        "tool_choice": choice
        if choice in ("auto", "required")
        else {"type": "function", "function": {"name": choice}},
        "max_tokens": TOKENS,
    }
    with TestClient(create_app(engine), base_url="http://127.0.0.1") as client:
        whole = client.post("/v1/chat/completions", json=body).json()
        streamed: dict[str, Any] = {"content": "", "tool_calls": []}
        lines = client.post("/v1/chat/completions", json={**body, "stream": True}).text
        for line in filter(None, lines.splitlines()):
            if line != "data: [DONE]":
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                streamed["content"] += delta.get("content") or ""
                streamed["tool_calls"] += delta.get("tool_calls") or []
    return [whole["choices"][0]["message"], streamed]


@pytest.mark.parametrize("names", MEMBERS, ids="+".join)
@pytest.mark.parametrize("choice", ("auto", *CHOICES))
def test_langchain_calls_tools(real_engine: Engines, names: Any, choice: str) -> None:
    for message in langchain_replies(real_engine(*names), choice):
        assert message.tool_calls or choice == "auto"
        for call in message.tool_calls:
            check_call(call["name"], call["args"])
        check_no_call(message.text)


@pytest.mark.parametrize("names", MEMBERS, ids="+".join)
@pytest.mark.parametrize("choice", ("auto", *CHOICES))
def test_llama_index_calls_tools(real_engine: Engines, names: Any, choice: str) -> None:
    for response in llama_index_replies(real_engine(*names), choice):
        calls = selections(response.message)
        assert calls or choice == "auto"
        for call in calls:
            check_call(call.tool_name, call.tool_kwargs)
        check_no_call(response.message.content or "")


@pytest.mark.parametrize("names", MEMBERS, ids="+".join)
@pytest.mark.parametrize("choice", ("auto", *CHOICES))
def test_the_server_calls_tools(real_engine: Engines, names: Any, choice: str) -> None:
    for message in server_replies(real_engine(*names), choice):
        calls = message.get("tool_calls") or []
        assert calls or choice == "auto"
        for call in calls:
            check_call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        check_no_call(message.get("content") or "")


def test_qwen_calls_a_tool_of_its_own_accord(real_engine: Engines) -> None:
    """Qwen2.5-Coder writes bare JSON here, which the grammar permits as free text."""
    engine = real_engine("qwen")
    for message in langchain_replies(engine, "auto"):
        (call,) = message.tool_calls
        assert call["name"] == "unit_price"
        assert message.content == ""
        assert message.response_metadata["finish_reason"] == "tool_calls"
