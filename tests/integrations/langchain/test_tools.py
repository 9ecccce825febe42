"""Tools: what members read, what becomes a call, and agents."""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import InjectedToolArg, tool

from langchain_adafuse import ChatAdaFuse, get_round_callback
from tests.support.instruction_follower import call
from tests.support.scripted import scripted_engine


@tool
def population(city: str) -> int:
    """How many people live in a city."""
    return {"Orrin": 1200, "Vell": 300}[city]


@tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


TOOLS = [population, multiply]


def chat_that(script, other=None, **fields):
    """A model that only describes tools to its members, so that calls may be malformed."""
    return ChatAdaFuse(engine=scripted_engine(script, other), **{"enforce": False, **fields})


def test_functions_may_have_injected_arguments_of_any_class():
    def look_up(city, index):
        """Look a city up."""

    index = Annotated[InMemoryCache, InjectedToolArg]
    look_up.__annotations__ = {"city": str, "index": index, "return": str}
    (described,) = chat_that(str).bind_tools([look_up]).kwargs["tools"]
    assert [*described["function"]["parameters"]["properties"]] == ["city"]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (None, "Call a tool only where it helps"),
        ("any", "must call at least one tool"),
        ({"type": "tool", "name": "multiply"}, "must call the tool multiply"),
        ("none", None),
    ],
)
def test_every_member_reads_the_tools_and_the_choice(choice, told):
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        return "Well."

    chat_that(script).bind_tools(TOOLS, tool_choice=choice).invoke("What is 2 times 3?")
    for template in ("<|im_start|>", "[INST]"):
        (read, *_) = [p for p in prompts if template in p and "2 times 3" in p]
        assert (told is not None) == ('"name": "population"' in read) == ('"multiply"' in read)
        assert told is None or told in read


MALFORMED = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": }}\n</tool_call>'


async def test_a_malformed_call_has_its_reason_and_can_be_answered():
    reply, error = MALFORMED, "not JSON"
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        return "It is 6." if "Bad JSON." in prompt else f"So:\n{reply}"

    chat = chat_that(script).bind_tools(TOOLS)
    text = reply.removeprefix("<tool_call>").removesuffix("</tool_call>")
    for message in (chat.invoke("Go"), await chat.ainvoke("Go")):
        (invalid,) = message.invalid_tool_calls
        assert error in invalid["error"]
        assert invalid["args"] == text
        assert "<tool_call>" not in str(message.additional_kwargs)
        assert message.content == "So:\n"
        assert message.response_metadata["finish_reason"] == "stop"
        answer = ToolMessage("Bad JSON.", tool_call_id=invalid["id"], status="error")
        assert chat.invoke([HumanMessage("Go"), message, answer]).content == "It is 6."
    for template in ("<|im_start|>", "[INST]"):
        (read, *_) = [p for p in prompts if template in p and "Bad JSON." in p]
        assert f"So:\n<tool_call>\n{text.strip()}\n</tool_call>" in read
        assert '<tool_response>\n{"content": "Bad JSON."}\n</tool_response>' in read

    streamed: Any = reduce(add, list(chat.stream("Go")))
    (invalid,) = streamed.invalid_tool_calls
    assert error in streamed.additional_kwargs["adafuse_call_errors"][invalid["id"]]
    answer = ToolMessage("Bad JSON.", tool_call_id=invalid["id"])
    assert chat.invoke([HumanMessage("Go"), streamed, answer]).content == "It is 6."
    assert not [each for each in prompts if "<tool_call><tool_call>" in each]


# Agents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("enforce", ["auto", False])
async def test_a_tool_is_not_called_with_what_the_limit_cuts(enforce, tmp_path):
    @tool
    def save_note(text: str) -> str:
        """Save a note."""
        (tmp_path / "note.txt").write_text(text, encoding="utf-8")
        return "Saved."

    def check(message):
        (cut,) = message.invalid_tool_calls
        assert (message.tool_calls, cut["name"]) == ([], "save_note")
        assert message.response_metadata["finish_reason"] == "length"
        assert "max_tokens" in str(message.response_metadata["adafuse_warnings"])
        return cut

    story = call("save_note", text="A fox. " * 40)
    fields = {"max_tokens": 120, "enforce": enforce, "cache": InMemoryCache()}
    chat = chat_that(lambda _: story, **fields)
    bound, given = chat.bind_tools([save_note]), {"messages": [HumanMessage("Save a story.")]}
    for message in (bound.invoke("Save."), bound.invoke("Save."), await bound.ainvoke("Save.")):
        assert "max_tokens" in check(message)["error"]
    check(reduce(add, list(bound.stream("Save."))))
    check(reduce(add, [chunk async for chunk in bound.astream("Save.")]))
    agent: Any = create_agent(chat, [save_note])
    check(agent.invoke(given)["messages"][-1])
    async for mode, data in agent.astream(given, stream_mode=["messages", "values"]):
        last = data["messages"][-1] if mode == "values" else None
    check(last)
    events = [event async for event in agent.astream_events(given, version="v2")]
    (end,) = [event for event in events if event["event"] == "on_chat_model_end"]
    check(end["data"]["output"])
    both = f"{call('save_note', text='A fox.')}\n{story}"
    whole = chat_that(lambda _: both, **{**fields, "max_tokens": 200})
    message = whole.bind_tools([save_note]).invoke("Save.")
    assert [each["args"] for each in message.tool_calls] == [{"text": "A fox."}]
    assert [each["name"] for each in message.invalid_tool_calls] == ["save_note"]
    assert not list(tmp_path.iterdir())


async def test_an_empty_last_message_has_a_warning(caplog):
    message = chat_that(lambda _: "").bind_tools(TOOLS).invoke("Go")
    assert message.response_metadata["adafuse_warnings"] == ["the reply is empty"]
    assert "the reply is empty" in caplog.text


def asks_in_turn(prompt):
    if '"content": "2400"' in prompt:
        return "Twice Orrin is 2400."
    if '"content": "1200"' in prompt:
        return call("multiply", a=1200, b=2)
    return call("population", city="Orrin")


async def test_agents_stream_messages_rounds_and_events():
    agent: Any = create_agent(chat_that(asks_in_turn, round_detail="full"), TOOLS)
    given = {"messages": [HumanMessage("How many?")]}
    stream = agent.astream(given, stream_mode="messages")
    pieces = [piece async for piece, at in stream if at["langgraph_node"] == "model"]
    rounds = [
        each for piece in pieces for each in piece.additional_kwargs.get("adafuse_rounds", ())
    ]
    assert "".join(str(piece.content) for piece in pieces) == "Twice Orrin is 2400."
    called = [each["name"] for piece in pieces for each in piece.tool_call_chunks]
    assert called == ["population", "multiply"]
    agent = create_agent(chat_that(asks_in_turn), TOOLS)
    stream = agent.astream(given, stream_mode="messages")
    pieces = [piece async for piece, at in stream if at["langgraph_node"] == "model"]
    assert all(
        piece.content or piece.tool_call_chunks or piece.response_metadata for piece in pieces
    )
    with get_round_callback() as heard:
        events = [event async for event in agent.astream_events(given, version="v2")]
    named = [each["name"] for each in events if each["event"] == "on_tool_end"]
    assert named == ["population", "multiply"]
    assert len(heard.rounds) == len(rounds)


# Histories ------------------------------------------------------------------------------------


PICTURE: dict[str, Any] = {"type": "image", "url": "data:x"}
FOUND = {"type": "search_result", "content": [{"type": "text", "text": "In Orrin."}, PICTURE]}
BLOCKS: list[Any] = ["1200", {"type": "json", "json": {"é": 1}}, PICTURE, FOUND]
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
    AIMessage("So."),
    HumanMessage("Thanks"),
]


def test_what_members_read_of_a_history(caplog):
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        return "Well."

    chat = chat_that(script)
    bound = chat.bind_tools(TOOLS)
    assert bound.invoke(HISTORY).content == "Well."
    for template in ("<|im_start|>", "[INST]"):
        (read, *_) = [each for each in prompts if template in each and "Thanks" in each]
        for said in ("Be brief.", "Anna: How many?", "I look.", '"name": "population"', "It has"):
            assert said in read
        result = json.dumps('1200\n{"é": 1}\nIn Orrin.', ensure_ascii=False)
        assert f'<tool_response>\n{{"name": "population", "content": {result}}}' in read
        assert "hidden" not in read
        assert "tool_use" not in read
    assert [each.getMessage().endswith(": image") for each in caplog.records] == [True]
    picture = [*HISTORY[:4], ToolMessage([PICTURE], tool_call_id="1")]
    assert bound.invoke(picture).content == "Well."
    assert any("(image left out)" in prompt for prompt in prompts)
    tokens = chat.get_num_tokens_from_messages(HISTORY, tools=TOOLS)
    assert tokens == bound.invoke(HISTORY).usage_metadata["input_tokens"]


FOREIGN: dict[str, tuple[dict[str, Any], str | None]] = {
    "text": ({"type": "text", "text": "It is 4."}, "It is 4."),
    "text of the responses API": ({"type": "output_text", "text": "It is 4."}, "It is 4."),
    "refusal": ({"type": "refusal", "refusal": "I refuse."}, "I refuse."),
    "thinking": ({"type": "thinking", "thinking": "Hm.", "signature": "x"}, None),
    "reasoning": ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}, None),
    "tool use": ({"type": "tool_use", "id": "1", "name": "f", "input": {}}, None),
    "image": ({"type": "image_url", "image_url": {"url": "data:x"}}, None),
    "server tool": ({"type": "server_tool_use", "id": "1", "name": "f", "input": {}}, None),
    "a part of another API": ({"inline_data": {"data": "x"}}, None),
    "odd text": ({"type": "text", "text": None}, None),
}
NOTED = ("image", "server tool", "a part of another API", "odd text")


@pytest.mark.parametrize("kind", FOREIGN)
def test_assistant_blocks_of_other_providers_are_read_or_dropped(kind, caplog):
    block, text = FOREIGN[kind]
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        return "Good."

    chat = chat_that(script)
    history = [HumanMessage("2+2?"), AIMessage([block, "Yes."]), HumanMessage("Sure?")]
    assert chat.invoke(history).content == "Good."
    assert list(chat.stream(history, max_words=1))
    assert any(f"{text or ''}Yes." in prompt for prompt in prompts)
    assert len(caplog.records) == (kind in NOTED)
    if kind in NOTED:
        assert block.get("type", "inline_data") in caplog.text
    with pytest.raises(ValueError, match="only text is allowed"):
        chat.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "data:x"}}])])


def test_a_malformed_call_of_another_provider_may_have_no_arguments():
    lost = {"type": "invalid_tool_call", "name": "multiply", "args": None, "id": "1", "error": None}
    prompts = []
    model = chat_that(lambda prompt: prompts.append(prompt) or "Well.")
    model.invoke([HumanMessage("2 times 3?"), AIMessage("", invalid_tool_calls=[lost])])
    assert not [each for each in prompts if "None" in each]
