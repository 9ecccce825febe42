"""Prompts of real members against `apply_chat_template` of their own tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import convert_to_messages
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM
from transformers import AutoTokenizer

from adafuse_llm import AdaFuseEngine
from langchain_adafuse import ChatAdaFuse

pytestmark = pytest.mark.real

Engines = Callable[..., AdaFuseEngine]

MEMBERS = ("smollm", "qwen")
"""The members with a chat template."""


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A tool as OpenAI's API has it. All parameters are required."""
    schema = {
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": [*parameters],
        "type": "object",  # not where pydantic and others put it: the order has to stay
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("unit_price", "Return the unit price of an item.", item="string"),
    tool("multiply", "Multiply two numbers.", b="number", a="number"),
]


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

CHATS: list[list[Any]] = [
    [ASK],
    [{"role": "system", "content": ""}, ASK],
    [SYSTEM, ASK, SAY, THEN],
]
CALLS: list[list[Any]] = [[ASK, CALLED, RESULT], [SYSTEM, ASK, BOTH, *RESULTS, SAY, THEN]]
CASES = [
    *((name, chat, []) for name in MEMBERS for chat in CHATS),
    *(("qwen", chat, TOOLS) for chat in (*CHATS, *CALLS)),
]
"""Members, conversations, and tools: SmolLM2's template has none."""


@pytest.fixture(scope="module")
def tokenizers(real_folders: dict[str, Path]) -> dict[str, Any]:
    return {name: AutoTokenizer.from_pretrained(real_folders[name]) for name in MEMBERS}


def own(tokenizer: Any, messages: list[Any], **options: Any) -> list[int]:
    """The tokens that transformers makes of a conversation."""
    options = {"add_generation_prompt": True, **options}
    return list(tokenizer.apply_chat_template(messages, return_dict=False, **options))


@pytest.mark.parametrize(("name", "messages", "tools"), CASES)
def test_prompts_equal_the_template(
    real_engine: Engines, tokenizers: dict[str, Any], name: str, messages: Any, tools: Any
) -> None:
    expected = own(tokenizers[name], messages, **({"tools": tools} if tools else {}))
    given = json.loads(json.dumps(messages))
    assert real_engine(name).encode_prompt(messages=given, tools=tools)[name] == expected


def test_prompts_of_the_frameworks_equal_the_template(
    real_engine: Engines, tokenizers: dict[str, Any]
) -> None:
    engine, messages = real_engine("qwen"), CALLS[1]
    expected = {"qwen": own(tokenizers["qwen"], messages, tools=TOOLS)}
    given = convert_to_messages(json.loads(json.dumps(messages)))
    call = ChatAdaFuse(engine=engine)._call(given, None, {"tools": TOOLS})
    assert engine.encode_prompt(messages=call.requests[0].messages) == expected
    llm = AdaFuseLLM(engine=engine, enforce=False)
    asked = [
        ChatMessage(
            role=each["role"],
            content=each["content"],
            additional_kwargs={k: v for k, v in each.items() if k not in ("role", "content")},
        )
        for each in messages
    ]
    _, request, _ = llm._chat(asked, {"tools": TOOLS})._prepare()
    assert engine.encode_prompt(messages=request.messages) == expected


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
