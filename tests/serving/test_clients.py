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


def chat_model(address, **options):
    url, key = f"{address}/v1", SecretStr("none")
    return ChatOpenAI(base_url=url, api_key=key, model="adafuse", **options)


def test_langchains_class_for_openai(address, expected):
    chat = chat_model(address, max_tokens=24)
    message = chat.invoke(QUESTION)
    assert message.content == expected.text
    assert message.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == expected.text
    with pytest.raises(ContextOverflowError):
        chat.invoke("mill " * 9000)


def test_langchains_tools_and_objects_are_enforced(address):
    def look_up(name: str) -> str:
        """Look up a name in the handbook."""
        return name

    caller = chat_model(address).bind_tools([look_up], tool_choice="look_up")
    (call,) = caller.invoke("Who was the architect of the Silesse Mill?").tool_calls
    assert call["name"] == "look_up"
    assert isinstance(call["args"]["name"], str)
    answers = chat_model(address).with_structured_output(Answer, method="json_schema")
    assert isinstance(answers.invoke(QUESTION), Answer)


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
