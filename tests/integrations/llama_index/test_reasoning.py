"""Reasoning in replies and histories."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.adafuse import AdaFuseLLM
from llama_index.llms.adafuse._messages import to_turns

from tests.support.llama_calls import PATHS, ask
from tests.support.thinkers import continuing, thinkers

pytestmark = pytest.mark.quick


def thinking_of(message: ChatMessage) -> list[str | None]:
    return [block.content for block in message.blocks if isinstance(block, ThinkingBlock)]


@pytest.mark.parametrize("path", PATHS)
async def test_reasoning_that_the_template_opens_is_not_text(path: str) -> None:
    engine = thinkers("deepseek", "deepseek-2", script=lambda _: "secret</think>Paris.")
    said = await ask(AdaFuseLLM(engine=engine), path, "The capital?")
    assert said.text == "Paris."
    if "stream" in path:
        assert "".join(delta or "" for delta in said.deltas) == "Paris."


def test_reasoning_is_a_block_of_the_message() -> None:
    engine = thinkers("deepseek", script=lambda _: "secret</think>Paris.")
    llm = AdaFuseLLM(engine=engine)
    asked = [ChatMessage("The capital?")]
    assert thinking_of(llm.chat(asked).message) == ["secret"]
    *_, last = llm.stream_chat(asked)
    assert thinking_of(last.message) == ["secret"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert thinking_of(llm.chat(asked, tools=[tool]).message) == ["secret"]


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="assistant", blocks=[ThinkingBlock(content="so"), TextBlock(text="a")]),
        ChatMessage(role="assistant", content="a", additional_kwargs={"reasoning_content": "so"}),
    ],
)
def test_reasoning_of_histories_is_kept_for_templates_that_read_it(message: ChatMessage) -> None:
    (turn,) = to_turns([message], pytest.fail)
    assert turn["reasoning"] == "so"
    assert turn["content"] == "a"


def test_structured_prediction_reads_after_reasoning() -> None:
    class Found(BaseModel):
        x: int

    reply = 'Maybe {"x": 1}?</think>\n{"x": 2}'
    llm: Any = AdaFuseLLM(engine=thinkers("deepseek", script=lambda _: reply), enforce=False)
    assert llm.structured_predict(Found, PromptTemplate("?")).x == 2
    *_, last = llm.stream_structured_predict(Found, PromptTemplate("?"))
    assert last.x == 2


def test_a_reply_continues_the_last_message() -> None:
    engine = continuing("bytelevel", "sentencepiece")
    messages = [ChatMessage("Who?"), ChatMessage(role="assistant", content="The keeper of ")]
    by_call = AdaFuseLLM(engine=engine, continue_final_message=False)
    by_field = AdaFuseLLM(engine=engine, continue_final_message=True)
    assert by_field.chat(messages).message.content == "the light is Anna."
    said = by_call.chat(messages, continue_final_message=True)
    assert said.message.content == "the light is Anna."
    with pytest.raises(ValueError, match="needs an assistant message"):
        by_field.chat(messages[:1])
