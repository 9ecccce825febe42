"""Tools: what members read, what becomes a call, and agents."""

import json
from functools import reduce
from operator import add
from typing import Any, cast

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.tools import tool

from langchain_adafuse import ChatAdaFuse, get_round_callback
from tests.support.instruction_follower import call
from tests.support.scripted import scripted_engine

TEMPLATES = ("<|im_start|>", "[INST]")


@tool
def population(city: str) -> int:
    """How many people live in a city."""
    return {"Orrin": 1200, "Vell": 300}[city]


@tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


TOOLS = [population, multiply]


def chat_that(script, prompts=None, **fields):
    """A model that only describes tools to its members, so that calls may be malformed."""

    def reply(prompt):
        if prompts is not None:
            prompts.append(prompt)
        return script(prompt) if callable(script) else script

    return ChatAdaFuse(engine=scripted_engine(reply), **{"enforce": False, **fields})


def called(message):
    assert not message.invalid_tool_calls
    return [(each["name"], each["args"]) for each in message.tool_calls]


def test_calls_stream_in_pieces_and_stop_sequences_do_not_cut_them():
    calls = [call("population", city="</tool_call>\n"), call("multiply", a=2, b=3)]
    reply = "I look.\n" + "\n".join(calls)
    fields = {"enforce": True, "stop": ["}}"], "max_new_tokens": 300, "round_detail": "full"}
    chat = chat_that(reply, **fields)
    with get_round_callback() as heard:
        chunks = list(chat.bind_tools(TOOLS).stream("Go"))
    emitted: list[Any] = [{"city": "</tool_call>\n"}, {"a": 2, "b": 3}]
    pieces = [each for chunk in chunks for each in chunk.tool_call_chunks]
    for number, (name, args) in enumerate(zip(["population", "multiply"], emitted, strict=True)):
        first, *others = [each for each in pieces if each["index"] == number]
        assert (first["name"], bool(first["id"]), bool(others)) == (name, True, True)
        assert {(each["name"], each["id"]) for each in others} == {(None, None)}
        assert json.loads("".join(each["args"] or "" for each in (first, *others))) == args
    message: Any = reduce(add, chunks)
    assert called(message) == [("population", emitted[0]), ("multiply", emitted[1])]
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert len(message.additional_kwargs["adafuse_rounds"]) == len(heard.rounds)
    with get_round_callback() as heard:  # rounds that write a part of a call have no chunk
        one = chat.bind_tools(TOOLS).invoke("Go", parallel_tool_calls=False, round_detail="summary")
    assert called(one) == [("population", emitted[0])]
    count = one.response_metadata["adafuse_summary"]["rounds"]
    assert [each["round"] for each in heard.rounds] == list(range(count))


MALFORMED = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": }}\n</tool_call>'


def test_a_malformed_call_has_its_reason_and_can_be_answered(caplog):
    prompts: list[str] = []
    bound = chat_that(
        lambda prompt: "It is 6." if "Bad JSON." in prompt else f"So:\n{MALFORMED}", prompts
    ).bind_tools(TOOLS)
    streamed: Any = reduce(add, list(bound.stream("Go")))
    for message in (bound.invoke("Go"), streamed):
        (invalid,) = message.invalid_tool_calls
        (warning,) = message.response_metadata["adafuse_warnings"]
        assert "not JSON" in warning
        assert message is streamed or "not JSON" in invalid["error"]
        assert (message.tool_calls, message.content) == ([], "So:\n")
        assert message.response_metadata["finish_reason"] == "stop"
        answer = ToolMessage("Bad JSON.", tool_call_id=invalid["id"], status="error")
        assert bound.invoke([HumanMessage("Go"), message, answer]).content == "It is 6."
    assert "not JSON" in caplog.text
    for template in TEMPLATES:
        (read, *_) = [p for p in prompts if template in p and "Bad JSON." in p]
        assert f"So:\n{MALFORMED}" in read
        assert '<tool_response>\n{"content": "Bad JSON."}\n</tool_response>' in read


# Agents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("enforce", ["auto", False])
def test_a_tool_is_not_called_with_what_the_limit_cuts(enforce):
    saved = []

    @tool
    def save_note(text: str) -> str:
        """Save a note."""
        saved.append(text)
        return "Saved."

    story = call("save_note", text="A fox. " * 40)
    chat = chat_that(story, max_tokens=120, enforce=enforce, cache=InMemoryCache())
    bound, agent = chat.bind_tools([save_note]), cast("Any", create_agent(chat, [save_note]))
    said = {"messages": [HumanMessage("Save a story.")]}
    for message in (
        bound.invoke("Save."),
        bound.invoke("Save."),  # from the cache
        reduce(add, list(bound.stream("Save."))),
        agent.invoke(said)["messages"][-1],
        [*agent.stream(said, stream_mode=["messages", "values"])][-1][1]["messages"][-1],
    ):
        (cut,) = message.invalid_tool_calls
        assert not message.tool_calls
        assert "save_note" in (cut["name"] or cut["args"])
        assert message.response_metadata["finish_reason"] == "length"
        assert "max_tokens" in str(message.response_metadata["adafuse_warnings"])
    assert not saved


# Histories ------------------------------------------------------------------------------------


PICTURE: dict[str, Any] = {"type": "image", "url": "data:x"}
LOST: Any = {"type": "invalid_tool_call", "name": "f", "args": None, "id": "2", "error": None}
BLOCKS: list[Any] = ["1200", {"type": "json", "json": {"é": 1}}, PICTURE]
HISTORY = [
    SystemMessage([{"type": "text", "text": "Be brief."}]),
    HumanMessage("How many?", name="Anna"),
    HumanMessage([{"type": "text", "text": "In Orrin, <|im_end|> I mean."}]),
    AIMessage(
        [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "1", "name": "p"}],
        tool_calls=[{"name": "population", "args": {"city": "Orrin"}, "id": "1"}],
        additional_kwargs={"reasoning_content": "hidden thoughts"},
    ),
    ToolMessage(BLOCKS, tool_call_id="1"),
    AIMessage("<think>more hidden thoughts</think>It has 1200."),
    AIMessage([{"type": "refusal", "refusal": "I stop."}, PICTURE], invalid_tool_calls=[LOST]),
    AIMessage([{"type": "server_tool_use", "id": "3", "name": "g", "input": {}}, "So."]),
    HumanMessage("Thanks"),
]


def test_what_members_read_of_a_history(caplog):
    prompts: list[str] = []
    chat = chat_that("Well.", prompts)
    bound = chat.bind_tools(TOOLS)
    tokens = bound.invoke(HISTORY).usage_metadata["input_tokens"]
    assert tokens == chat.get_num_tokens_from_messages(HISTORY, tools=TOOLS)
    for template in TEMPLATES:
        (read, *_) = [each for each in prompts if template in each and "Thanks" in each]
        result = json.dumps('1200\n{"é": 1}\n[image, not shown]', ensure_ascii=False)
        for said in (
            *("Be brief.", "Anna: How many?", "I look.", "It has", "I stop.", "So."),
            f'<tool_response>\n{{"name": "population", "content": {result}}}',
        ):
            assert said in read
        assert "hidden" not in read
        assert "tool_use" not in read
    (warning,) = caplog.messages
    assert warning.endswith(": image, server_tool_use")
    assert bound.invoke([HumanMessage([PICTURE])]).content == "Well."
    assert any("user\n[image, not shown]" in prompt for prompt in prompts)


def test_any_part_of_a_history_is_counted_and_trimmed() -> None:
    chat = chat_that("Well.")
    assert chat.get_num_tokens_from_messages([]) == 0
    assert chat.get_num_tokens_from_messages([HumanMessage("")]) == 0
    for part in (HISTORY[4:5], HISTORY[::-1], HISTORY[3:4]):
        assert chat.get_num_tokens_from_messages(part) > 0
    size = chat.get_num_tokens_from_messages(HISTORY)
    trimmed = trim_messages(HISTORY, max_tokens=size // 2, token_counter=chat, strategy="last")
    assert 0 < len(trimmed) < len(HISTORY)
    assert chat.invoke(trimmed).content == "Well."
