"""Reasoning in replies and histories, and replies that continue a message."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from adafuse_llm.adapters.conversation import to_conversation
from langchain_adafuse import ChatAdaFuse
from langchain_adafuse._messages import to_turns
from tests.support.thinkers import continuing, prompts, thinkers

pytestmark = pytest.mark.quick


async def test_reasoning_that_the_template_opens_is_not_content() -> None:
    engine = thinkers("deepseek", "deepseek-2", script=lambda _: "secret</think>Paris.")
    chat = ChatAdaFuse(engine=engine)
    streamed: Any = reduce(add, list(chat.stream("The capital?")))
    pieces = [chunk async for chunk in chat.astream("The capital?")]
    replies = (
        chat.invoke("The capital?"),
        await chat.ainvoke("The capital?"),
        streamed,
        reduce(add, pieces),
    )
    for message in replies:
        assert message.content == "Paris."
        assert message.additional_kwargs["reasoning_content"] == "secret"

    history = to_conversation(to_turns([HumanMessage("?"), replies[0], HumanMessage("Sure?")]))
    read, _ = prompts(engine, history)
    assert all("Paris." in text and "secret" not in text for text in read.values())


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        (AIMessage("a", additional_kwargs={"reasoning_content": "so"}), "so"),
        (AIMessage([{"type": "thinking", "thinking": "so"}, "a"]), "so"),
        (AIMessage([{"type": "reasoning", "reasoning": "so"}, "a"]), "so"),
        (
            AIMessage([{"type": "reasoning_content", "reasoning_content": {"text": "so"}}, "a"]),
            "so",
        ),
        (AIMessage([{"type": "redacted_thinking", "data": "x"}, "a"]), ""),
        (AIMessage("a"), ""),
    ],
)
def test_reasoning_of_histories_is_kept_for_templates_that_read_it(
    message: BaseMessage, reasoning: str
) -> None:
    (turn,) = to_turns([message])
    assert turn["reasoning"] == reasoning
    assert turn["content"] == "a"


def test_structured_output_is_read_after_reasoning() -> None:
    reply = 'Maybe {"x": 1}?</think>\n{"x": 2}'
    chat = ChatAdaFuse(engine=thinkers("deepseek", script=lambda _: reply), enforce=False)
    schema = {"type": "object", "title": "X", "properties": {"x": {"type": "integer"}}}
    assert chat.with_structured_output(schema).invoke("?") == {"x": 2}


async def test_a_reply_continues_the_last_message() -> None:
    engine = continuing("bytelevel", "sentencepiece")
    messages = [HumanMessage("Who?"), AIMessage("The keeper of ")]
    by_call = ChatAdaFuse(engine=engine, continue_final_message=False)
    by_field = ChatAdaFuse(engine=engine, continue_final_message=True)
    assert by_field.invoke(messages).content == "the light is Anna."
    assert (await by_field.ainvoke(messages)).content == "the light is Anna."
    assert by_call.invoke(messages, continue_final_message=True).content == "the light is Anna."
    with pytest.raises(ValueError, match="continue_final_message needs an assistant message"):
        by_field.invoke("Who?")
