"""Tool calls of real members, in LangChain."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine
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


@pytest.mark.parametrize("names", MEMBERS, ids="+".join)
@pytest.mark.parametrize("choice", ("auto", *CHOICES))
def test_langchain_calls_tools(real_engine: Engines, names: Any, choice: str) -> None:
    for message in langchain_replies(real_engine(*names), choice):
        assert message.tool_calls or choice == "auto"
        for call in message.tool_calls:
            check_call(call["name"], call["args"])
        check_no_call(message.text)


def test_qwen_calls_a_tool_of_its_own_accord(real_engine: Engines) -> None:
    """Qwen2.5-Coder writes bare JSON here, which the grammar permits as free text."""
    engine = real_engine("qwen")
    for message in langchain_replies(engine, "auto"):
        (call,) = message.tool_calls
        assert call["name"] == "unit_price"
        assert message.content == ""
        assert message.response_metadata["finish_reason"] == "tool_calls"
