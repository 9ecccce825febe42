"""The classes for OpenAI's API of LangChain and LlamaIndex."""

from __future__ import annotations

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, SecretStr

QUESTION = "What does a ticket cost if three cost 12 florins?"
ROUNDS = {"adafuse": {"rounds": True}}


class Answer(BaseModel):
    florins: int


@pytest.fixture(scope="module")
def expected(engine):
    return engine.generate(messages=[{"role": "user", "content": QUESTION}], max_new_tokens=24)


def test_langchains_class_for_openai(address, expected):
    chat = ChatOpenAI(
        base_url=f"{address}/v1", api_key=SecretStr("none"), model="adafuse", max_tokens=24
    )
    message = chat.invoke(QUESTION)
    assert message.content == expected.text
    assert message.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == expected.text
    with pytest.raises(ContextOverflowError):
        chat.invoke("mill " * 9000)
    caller = chat.bind_tools([Answer], tool_choice="Answer")
    (call,) = caller.invoke(QUESTION, max_tokens=100).tool_calls
    assert isinstance(Answer(**call["args"]), Answer)


def test_llama_indexs_class_keeps_the_rounds(address, expected):
    llm = OpenAILike(
        model="adafuse",
        api_base=f"{address}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        context_window=4096,
        max_tokens=24,
        additional_kwargs={"extra_body": ROUNDS},
    )
    response = llm.chat([ChatMessage(role="user", content=QUESTION)])
    assert response.message.content == expected.text
    rounds = response.raw.choices[0].model_extra["adafuse"]["rounds"]
    assert [each["text"] for each in rounds] == [each.text for each in expected.rounds]
    chunks = list(llm.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    assert chunks[-1].message.content == expected.text
    extras = [(chunk.raw.model_extra or {}).get("adafuse", {}) for chunk in chunks]
    assert sum("round" in extra for extra in extras) == len(expected.rounds)
    llm.max_tokens = 200
    structured = llm.as_structured_llm(Answer).chat([ChatMessage(role="user", content=QUESTION)])
    assert isinstance(structured.raw, Answer)
