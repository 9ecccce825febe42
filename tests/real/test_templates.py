"""Prompts of real members against `apply_chat_template` of their own tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import convert_to_messages
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.adafuse import AdaFuseLLM
from transformers import AutoTokenizer

from adafuse_llm import AdaFuseEngine
from adafuse_llm.text.conversation import AUTO, REQUIRED
from langchain_adafuse import ChatAdaFuse

pytestmark = pytest.mark.real

Engines = Callable[..., AdaFuseEngine]

MEMBERS = ("smollm", "qwen")
"""The members with a chat template."""

DEFAULTS = {
    "smollm": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "qwen": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
}

PRICE = {
    "type": "function",
    "function": {
        "name": "unit_price",
        "description": "Return the unit price of an item.",
        "parameters": {
            "properties": {"item": {"description": "The item's name.", "type": "string"}},
            "required": ["item"],
            "type": "object",
        },
    },
}
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"b": {"type": "number"}, "a": {"type": "number"}},
            "required": ["b", "a"],
        },
    },
}
TOOLS = [PRICE, MULTIPLY]


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What does a bolt cost?"}
SAY = {"role": "assistant", "content": "  It costs 2.\n"}
THEN = {"role": "user", "content": "And café “naïve” 中文?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call(1, "unit_price", item="bolt")]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "2.5 <b>"}
BOTH = {
    "role": "assistant",
    "content": "I look up both.",
    "tool_calls": [
        call(1, "unit_price", item="bolt"),
        call(2, "multiply", b=2, a=[1.5, None, "é"]),
    ],
}
RESULTS = [RESULT, {"role": "tool", "tool_call_id": "call00002", "content": "5"}]

CHATS = {
    "one question": [ASK],
    "a system message": [SYSTEM, ASK],
    "an empty system message": [{"role": "system", "content": ""}, ASK],
    "several turns": [ASK, SAY, THEN],
    "a system message and turns": [SYSTEM, ASK, SAY, THEN],
}
TOOL_CHATS: dict[str, list[Any]] = {
    **CHATS,
    "a call": [ASK, CALLED, RESULT],
    "a system message and a call": [SYSTEM, ASK, CALLED, RESULT],
    "parallel calls": [ASK, BOTH, *RESULTS],
    "parallel calls and turns": [SYSTEM, ASK, BOTH, *RESULTS, SAY, THEN],
}


@pytest.fixture(scope="module")
def tokenizers(real_folders: dict[str, Path]) -> dict[str, Any]:
    return {name: AutoTokenizer.from_pretrained(real_folders[name]) for name in MEMBERS}


def own(tokenizer: Any, messages: list[Any], **options: Any) -> list[int]:
    """The tokens that transformers makes of a conversation."""
    options = {"add_generation_prompt": True, **options}
    return list(tokenizer.apply_chat_template(messages, return_dict=False, **options))


def for_engine(messages: list[Any]) -> list[Any]:
    return json.loads(json.dumps(messages))


def for_llama_index(messages: list[Any]) -> list[ChatMessage]:
    """The same messages in the form of LlamaIndex."""
    converted = []
    for message in messages:
        extras = {k: v for k, v in message.items() if k not in ("role", "content")}
        converted.append(
            ChatMessage(role=message["role"], content=message["content"], additional_kwargs=extras)
        )
    return converted


def langchain_prompt(
    engine: AdaFuseEngine, messages: list[Any], tools: list[Any], **options: Any
) -> dict[str, list[int]]:
    """The prompts that `ChatAdaFuse` gives to the members."""
    chat = ChatAdaFuse(engine=engine)
    keywords = {"tools": tools, **options} if tools else options
    call = chat._call(convert_to_messages(for_engine(messages)), None, keywords)
    return engine.encode_prompt(messages=call.requests[0].messages)


def llama_index_prompt(
    engine: AdaFuseEngine, messages: list[Any], tools: list[Any], **options: Any
) -> dict[str, list[int]]:
    """The prompts that `AdaFuseLLM` gives to the members."""
    llm = AdaFuseLLM(engine=engine, enforce=False)
    keywords = {"tools": tools, **options} if tools else options
    return engine.encode_prompt(messages=llama_index_messages(llm, messages, keywords))


def llama_index_messages(llm: AdaFuseLLM, messages: list[Any], keywords: Any) -> Any:
    """The conversation that `AdaFuseLLM` gives to the engine."""
    decode, _ = llm._chat(for_llama_index(messages), keywords)
    return decode._requests[0].messages


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("chat", CHATS)
def test_chats_equal_the_template(
    real_engine: Engines, tokenizers: dict[str, Any], name: str, chat: str
) -> None:
    engine, messages = real_engine(name), CHATS[chat]
    expected = {name: own(tokenizers[name], messages)}
    assert engine.encode_prompt(messages=messages) == expected
    assert langchain_prompt(engine, messages, []) == expected
    assert llama_index_prompt(engine, messages, []) == expected


@pytest.mark.parametrize("chat", TOOL_CHATS)
def test_tools_equal_the_template(
    real_engine: Engines, tokenizers: dict[str, Any], chat: str
) -> None:
    engine, messages = real_engine("qwen"), TOOL_CHATS[chat]
    expected = {"qwen": own(tokenizers["qwen"], messages, tools=TOOLS)}
    assert engine.encode_prompt(messages=for_engine(messages), tools=TOOLS) == expected
    assert langchain_prompt(engine, messages, TOOLS) == expected
    assert llama_index_prompt(engine, messages, TOOLS) == expected


def test_tools_of_the_frameworks_equal_the_template(
    real_engine: Engines, tokenizers: dict[str, Any]
) -> None:
    from langchain_core.utils.function_calling import convert_to_openai_tool

    def unit_price(item: str, currency: str = "EUR") -> str:
        """Return the unit price of an item."""
        return "2"

    engine = real_engine("qwen")
    expected = {"qwen": own(tokenizers["qwen"], [ASK], tools=[convert_to_openai_tool(unit_price)])}
    bound: Any = ChatAdaFuse(engine=engine).bind_tools([unit_price])
    assert langchain_prompt(engine, [ASK], **bound.kwargs) == expected
    tool = FunctionTool.from_defaults(unit_price)
    llm = AdaFuseLLM(engine=engine, enforce=False)
    tools = llm._prepare_chat_with_tools([tool])["tools"]
    expected = {"qwen": own(tokenizers["qwen"], [ASK], tools=tools)}
    assert llama_index_prompt(engine, [ASK], tools) == expected


@pytest.mark.parametrize(("name", "tools"), [("smollm", []), ("qwen", []), ("qwen", TOOLS)])
@pytest.mark.parametrize("begun", ["The answer", "The price is 2.", "It costs \n"])
def test_continued_messages_equal_the_template(
    real_engine: Engines, tokenizers: dict[str, Any], name: str, tools: list[Any], begun: str
) -> None:
    messages = [ASK, {"role": "assistant", "content": begun}]
    prompt = real_engine(name).encode_prompt(
        messages=messages, tools=tools, continue_final_message=True
    )[name]
    known = tokenizers[name]
    text = known.apply_chat_template(
        messages,
        tools=tools or None,
        tokenize=False,
        continue_final_message=True,
    )
    assert known.decode(prompt).rstrip() == text.rstrip()
    assert known.decode(prompt).endswith(begun)  # transformers drops spaces at the end
    if not begun.endswith("\n"):
        assert prompt == known.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize(("choice", "added"), [("auto", AUTO), ("required", REQUIRED)])
def test_the_default_system_text_stays_with_tools(
    real_engine: Engines, tokenizers: dict[str, Any], name: str, choice: str, added: str
) -> None:
    engine = real_engine(name)
    tokens = engine.encode_prompt(messages=[ASK], tools=TOOLS, tool_choice=choice)[name]
    text = tokenizers[name].decode(tokens)
    assert text.count("<|im_start|>system") == 1
    assert f"<|im_start|>system\n{DEFAULTS[name]}\n\n" in text
    assert (added in text) == (name == "smollm" or choice == "required")
    given = engine.encode_prompt(messages=[SYSTEM, ASK], tools=TOOLS, tool_choice=choice)[name]
    text = tokenizers[name].decode(given)
    assert "<|im_start|>system\nBe brief.\n\n" in text
    assert DEFAULTS[name] not in text


@pytest.mark.parametrize("name", MEMBERS)
def test_the_default_system_text_stays_with_a_schema(
    real_engine: Engines, tokenizers: dict[str, Any], name: str
) -> None:
    from pydantic import BaseModel

    class Price(BaseModel):
        price: float

    engine = real_engine(name)
    schema = {"type": "json_schema", "json_schema": {"schema": Price.model_json_schema()}}
    prompts = [langchain_prompt(engine, [ASK], [], response_format=schema)]
    llm = AdaFuseLLM(engine=engine, enforce=False)
    asked = llama_index_messages(llm, [ASK], {"response_format": schema})
    prompts.append(engine.encode_prompt(messages=asked))
    assert prompts[0] == prompts[1]
    text = tokenizers[name].decode(prompts[0][name])
    assert f"<|im_start|>system\n{DEFAULTS[name]}\n\nReply with one JSON value" in text
