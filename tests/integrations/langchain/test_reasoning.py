"""Reasoning in replies and histories, and replies that continue a message."""

from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, HumanMessageChunk

from adafuse_llm.adapters.conversation import to_conversation
from langchain_adafuse import ChatAdaFuse
from langchain_adafuse._messages import to_turn
from tests.support.thinkers import prompts, thinkers

pytestmark = pytest.mark.quick


async def test_reasoning_that_the_template_opens_is_not_content() -> None:
    engine = thinkers("deepseek", "deepseek-2", script=lambda _: "secret</think>Paris.")
    chat = ChatAdaFuse(engine=engine)
    pieces = [chunk async for chunk in chat.astream("The capital?")]
    streamed: Any = reduce(add, pieces)
    for message in (chat.invoke("The capital?"), streamed):
        assert message.content == "Paris."
        assert message.additional_kwargs["reasoning_content"] == "secret"
        history = [HumanMessageChunk(content="?"), message, HumanMessage("Sure?")]
        read, _ = prompts(engine, to_conversation(map(to_turn, history)))
        assert all("Paris." in text and "secret" not in text for text in read.values())


@pytest.mark.parametrize(
    ("effort", "thought", "is_read"), [("none", "", True), ("high", "Three is few.", False)]
)
def test_an_effort_reaches_the_templates_that_read_it(
    effort: str, thought: str, is_read: bool, caplog: Any
) -> None:
    engine = thinkers("qwen", script=lambda _: f"<think>\n{thought}\n</think>\n\nFour.")
    message = ChatAdaFuse(engine=engine, reasoning_effort=effort).invoke("How many?")
    assert message.content == "Four."
    assert message.additional_kwargs.get("reasoning_content", "").strip() == thought
    assert ("no chat template of the members reads it" in caplog.text) is not is_read


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        (AIMessage("a", additional_kwargs={"reasoning_content": "so"}), "so"),
        (AIMessage([{"type": "thinking", "thinking": "so"}, "a"]), "so"),
        (AIMessage([{"type": "reasoning", "reasoning": "so"}, "a"]), "so"),
        (AIMessage("a"), None),
    ],
)
def test_reasoning_of_histories_is_kept_for_templates_that_read_it(
    message: AIMessage, reasoning: str
) -> None:
    turn = to_turn(message)
    assert (turn["content"], turn["reasoning"]) == (["a"], reasoning)
