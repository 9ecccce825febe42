"""Function calling: what agents, programs and selectors of LlamaIndex do with the LLM."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    CodeActAgent,
    FunctionAgent,
    ToolCallResult,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.selectors import PydanticMultiSelector, PydanticSingleSelector
from llama_index.core.tools import FunctionTool
from llama_index.llms.adafuse import AdaFuseLLM
from llama_index.llms.adafuse._calls import Reply
from llama_index.llms.adafuse._decode import Chunk
from llama_index.llms.adafuse.raw import AdaFuseRaw

from adafuse_llm import AdaFuseEngine, InvalidInputError, MalformedReplyError
from adafuse_llm.adapters.reply_form import ReplyForm
from adafuse_llm.strategies import FixedWords
from adafuse_llm.text.conversation import Tool
from tests.support.instruction_follower import call as written_call
from tests.support.llama_calls import recorded
from tests.support.scripted import scripted, scripted_engine

QUICK: dict[str, Any] = {"max_words": 1, "branching_factor": 1, "max_word_tokens": 4}
"""Options for members that have nothing to say about what they must write."""

WAYS = ("chat", "achat", "stream_chat", "astream_chat")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def greet(name: str, formal: bool = False) -> str:
    """Greet somebody."""
    return f"Good day, {name}." if formal else f"Hi {name}!"


ADD, GREET = FunctionTool.from_defaults(add), FunctionTool.from_defaults(greet)
SUM = written_call("add", a=12, b=7)
HELLO = written_call("greet", name="Zoë", formal=True)


def clerk(prompt: str) -> str:
    """Calls tools once, or speaks freely."""
    if '<tool_response>\n{"name"' in prompt:
        return "It is 19."
    if "Do both" in prompt:
        return f"Let me see.\n{SUM}\n{HELLO}"
    return SUM if "12 plus 7" in prompt else "I only add."


def stubborn(prompt: str) -> str:
    """Never does what it is asked to do."""
    return "I would rather talk about ships."


@pytest.fixture(scope="module")
def llm():
    with scripted_engine(clerk) as engine:
        yield AdaFuseLLM(engine=engine)


@pytest.fixture(scope="module")
def free(llm):
    """The same members; nothing is enforced."""
    return AdaFuseLLM(engine=llm.engine, enforce=False)


@pytest.fixture(scope="module")
def stubborn_llm():
    with scripted_engine(stubborn) as engine:
        ends = {'"': 50}  # strings end, so that no limit cuts them off
        yield AdaFuseLLM(engine=engine, max_new_tokens=90, logit_bias=ends, **QUICK)


async def with_tools(llm: Any, way: str, *args: Any, **kwargs: Any) -> list[ChatResponse]:
    """The response, or the chunks, of one of the four forms of `chat_with_tools`."""
    given = getattr(llm, f"{way}_with_tools")(*args, **kwargs)
    if way == "astream_chat":
        return [each async for each in await given]
    if way == "stream_chat":
        return list(given)
    return [await given if way == "achat" else given]


def calls_of(response: ChatResponse) -> list[tuple[str, Any]]:
    blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    return [(block.tool_name, block.tool_kwargs) for block in blocks]


# What the LLM says of itself ---------------------------------------------------------------------


@pytest.mark.quick
def test_it_is_a_function_calling_model_only_where_calls_can_be_enforced(llm, free, monkeypatch):
    assert issubclass(AdaFuseLLM, FunctionCallingLLM)
    assert llm.metadata.is_function_calling_model
    assert not free.metadata.is_function_calling_model
    monkeypatch.setattr(AdaFuseEngine, "can_enforce", False)
    for enforce in ("auto", True):
        limited = AdaFuseLLM(engine=llm.engine, enforce=enforce)
        assert not limited.metadata.is_function_calling_model
    monkeypatch.undo()
    monkeypatch.setattr(FixedWords, "options", frozenset())
    monkeypatch.setattr(llm.engine, "strategy", FixedWords(1))
    assert not llm.metadata.is_function_calling_model
    assert calls_of(llm.chat_with_tools([ADD], "12 plus 7?"))  # requested in the prompt


# Agents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_function_agent(llm, streaming):
    agent = FunctionAgent(tools=[add, greet], llm=llm, streaming=streaming)
    handler = agent.run("What is 12 plus 7?")
    events = [event async for event in handler.stream_events()]
    response: Any = await handler
    assert str(response) == "It is 19."
    (result,) = [event for event in events if isinstance(event, ToolCallResult)]
    assert (result.tool_name, result.tool_kwargs) == ("add", {"a": 12, "b": 7})
    assert result.tool_output.content == "19"
    if streaming:
        shown = [event for event in events if isinstance(event, AgentStream)]
        assert "".join(event.delta for event in shown) == "It is 19."


async def test_a_code_act_agent_hands_over():
    def coder(prompt: str) -> str:
        if "You know prices" in prompt:
            return "19 crowns."
        if "Result of executing the code given:\n\n5" in prompt:
            return written_call("handoff", to_agent="Clerk", reason="prices")
        return "<execute>\nprint(2 + 3)\n</execute>"

    async def execute(code: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(code, {})
        return said.getvalue().strip()

    with scripted_engine(coder) as engine:
        llm = AdaFuseLLM(engine=engine)
        first = CodeActAgent(
            name="Coder", code_execute_fn=execute, llm=llm, can_handoff_to=["Clerk"]
        )
        second = FunctionAgent(
            name="Clerk", description="Knows prices.", system_prompt="You know prices.", llm=llm
        )
        workflow = AgentWorkflow(agents=[first, second], root_agent="Coder")
        response: Any = await workflow.run(user_msg="What does the bread cost?")
    assert (str(response), response.current_agent_name) == ("19 crowns.", "Clerk")


# chat_with_tools ---------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("enforce", ["auto", False])
async def test_text_and_calls(llm, free, way, enforce):
    asked = {"auto": llm, False: free}[enforce]
    *_, last = chunks = await with_tools(
        asked, way, [ADD, GREET], "Do both: 12 plus 7, greet.", allow_parallel_tool_calls=True
    )
    assert last.message.content == "Let me see.\n"
    assert last.message.role == MessageRole.ASSISTANT
    assert calls_of(last) == [
        ("add", {"a": 12, "b": 7}),
        ("greet", {"name": "Zoë", "formal": True}),
    ]
    selected = asked.get_tool_calls_from_response(last)
    assert [(each.tool_name, each.tool_kwargs) for each in selected] == calls_of(last)
    assert len({each.tool_id for each in selected}) == 2
    assert last.raw is not None
    assert last.raw.finish_reason == "stop"
    assert "".join(chunk.delta or "" for chunk in chunks) == last.message.content
    assert not [chunk for chunk in chunks if "<tool_call" in (chunk.message.content or "")]
    (plain,) = await with_tools(asked, "chat", [ADD], "What can you do?")
    assert (plain.message.content, calls_of(plain)) == ("I only add.", [])
    assert asked.get_tool_calls_from_response(plain, error_on_no_tool_call=False) == []


CHOICES: dict[str, tuple[dict[str, Any], int, set[str]]] = {
    "required": ({"tool_required": True}, 3, {"add", "greet"}),
    "any": ({"tool_choice": "any"}, 3, {"add", "greet"}),
    "one": ({"tool_choice": "required", "allow_parallel_tool_calls": False}, 1, {"add", "greet"}),
    "name": ({"tool_choice": "greet"}, 1, {"greet"}),
    "dict": ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, 1, {"add"}),
    "choice before required": ({"tool_choice": "greet", "tool_required": True}, 1, {"greet"}),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("choice", CHOICES)
async def test_calls_that_must_be_made_are_made_and_fit_their_schemas(stubborn_llm, way, choice):
    options, at_most, allowed = CHOICES[choice]
    options = {"allow_parallel_tool_calls": True, **options}
    *_, last = await with_tools(stubborn_llm, way, [ADD, GREET], "Hello?", **options)
    assert not last.message.content
    calls = calls_of(last)
    assert 1 <= len(calls) <= at_most or at_most == 3
    for name, arguments in calls:
        assert name in allowed
        tool = {"add": ADD, "greet": GREET}[name]
        assert tool.metadata.fn_schema is not None
        tool.metadata.fn_schema.model_validate(arguments, strict=True)
        assert arguments.keys() <= {"add": {"a", "b"}, "greet": {"name", "formal"}}[name]


class Sum(BaseModel):
    """A sum of numbers and of other sums."""

    terms: list[Sum | int]


async def test_the_arguments_of_a_recursive_class_have_its_form(stubborn_llm):
    tool = FunctionTool.from_defaults(lambda **kwargs: "", "keep", "Keep it.", fn_schema=Sum)
    options = {"tool_choice": "keep", "max_new_tokens": 400, "logit_bias": {"]": 80.0}}
    *_, last = await with_tools(stubborn_llm, "chat", [tool], "Hello?", **options)
    ((_, arguments),) = calls_of(last)
    assert Sum.model_validate(arguments, strict=True)


async def test_without_a_choice_of_tools_there_is_text(llm, stubborn_llm):
    free: dict[str, Any] = {"logit_bias": {}}
    for options in ({"tool_choice": "none", **free}, free):
        (response,) = await with_tools(stubborn_llm, "chat", [ADD], "Hello?", **options)
        assert (response.message.content, calls_of(response)) == (stubborn(""), [])
    response = llm.chat([ChatMessage("12 plus 7?")])
    assert response.message.content == SUM  # no tools: the text of the reply, unchanged
    (one,) = await with_tools(llm, "chat", [ADD, GREET], "Do both: 12 plus 7, greet.")
    assert calls_of(one) == [("add", {"a": 12, "b": 7})]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "ad"}, r"got 'ad'. Did you mean 'add'"),
        ({"tool_choice": 3}, "tool_choice must be"),
        ({"tools": [], "tool_required": True}, "at least one tool"),
        ({"tool_chioce": "add"}, "unknown option 'tool_chioce'"),
        ({"json_schema": {"type": "object"}}, "json_schema cannot be combined with tools"),
        ({"tools": [ADD, ADD]}, "different names"),
    ],
)
async def test_a_request_that_cannot_be_made_is_an_error_before_any_computation(
    free, options, message
):
    options = {"tools": [ADD], **options}
    with recorded() as record:
        for way in WAYS:
            with pytest.raises(InvalidInputError, match=message):
                await with_tools(free, way, user_msg="12 plus 7?", **options)
    assert not record.named("AdaFuseRoundEvent")


def test_tools_of_a_chat_are_dicts_or_tools(llm):
    described = ADD.metadata.to_openai_tool()
    for tool in (ADD, described, described["function"]):
        response = llm.chat([ChatMessage("12 plus 7?")], tools=[tool], tool_choice="add")
        assert calls_of(response) == [("add", {"a": 12, "b": 7})]
    with pytest.raises(InvalidInputError, match="tools must be tools of LlamaIndex, or dicts"):
        llm.chat([ChatMessage("12 plus 7?")], tools=[add])
    with pytest.raises(InvalidInputError, match="parallel_tool_calls must be True or False"):
        llm.chat([ChatMessage("12 plus 7?")], tools=[ADD], parallel_tool_calls="no")


def test_a_reply_is_read_again_as_part_of_the_conversation(llm):
    asked = ChatMessage("What is 12 plus 7?")
    first = llm.chat_with_tools([ADD], asked)
    (selected,) = llm.get_tool_calls_from_response(first)
    result = ChatMessage(
        role="tool", content="19", additional_kwargs={"tool_call_id": selected.tool_id}
    )
    second = llm.chat_with_tools([ADD], chat_history=[asked, first.message, result])
    assert (second.message.content, calls_of(second)) == ("It is 19.", [])
    as_json = ChatMessage.model_validate_json(first.message.model_dump_json())
    assert llm.chat([asked, as_json, result], tools=[ADD]).message.content == "It is 19."


def test_a_prompt_of_ones_own_describes_the_tools():
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return SUM

    with AdaFuseEngine([scripted(script)]) as engine:
        llm = AdaFuseLLM(
            engine=engine,
            messages_to_prompt=lambda messages: "\n".join(str(m) for m in messages) + "\nAnswer:",
        )
        response = llm.chat_with_tools([ADD], "12 plus 7?", tool_required=True)
    assert calls_of(response) == [("add", {"a": 12, "b": 7})]
    assert any('"name": "add", "description"' in text and "12 plus 7?" in text for text in seen)


def test_options_of_the_llm_that_constrain_replies_give_way_to_tools(llm):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for enforce in ("auto", False):
        asked = AdaFuseLLM(engine=llm.engine, json_schema=schema, enforce=enforce)
        response = asked.chat_with_tools([ADD], "What is 12 plus 7?")
        assert calls_of(response) == [("add", {"a": 12, "b": 7})]


# Streams -----------------------------------------------------------------------------------------


async def test_a_stream_shows_calls_that_grow(llm):
    chunks = await with_tools(
        llm, "stream_chat", [GREET, ADD], "Do both: 12 plus 7, greet.",
        allow_parallel_tool_calls=True, max_words=1,
    )  # fmt: skip
    shown = [llm.get_tool_calls_from_response(c, error_on_no_tool_call=False) for c in chunks]
    sizes = [len(calls) for calls in shown]
    assert sizes == sorted(sizes)
    assert {*sizes} == {0, 1, 2}
    for position in (0, 1):
        same = [calls[position] for calls in shown if len(calls) > position]
        assert len({call.tool_id for call in same}) == 1
        grown = [len(call.tool_kwargs) for call in same]
        assert grown == sorted(grown)
        assert grown[0] < grown[-1] == 2


def chunk(delta: str, last: bool = False) -> Chunk:
    return Chunk("", delta, AdaFuseRaw(rounds=(), finish_reason="stop" if last else None))


REPLIES = {
    "text": ("Just text, <tool or not.", "Just text, <tool or not.", "", []),
    "calls": (f"{SUM}\n{HELLO}", "", "", ["add", "greet"]),
    "all": (f"<think>Hm.</think>\nSee:\n{SUM}\n", "See:\n", "Hm.", ["add"]),
    "malformed": (f"See:\n<tool_call>\nadd!\n</tool_call>\n{SUM}",
                  "See:\n<tool_call>\nadd!\n</tool_call>", "", ["add"]),
    "unfinished": ("<tool_call>\n{", "<tool_call>\n{", "", []),
    "nothing": ("", "", "", []),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_reply_is_the_same_however_it_is_cut(name, size):
    text, content, thinking, calls = REPLIES[name]
    reply = Reply(ReplyForm([Tool("add", "", {}), Tool("greet", "", {})], "auto"))
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    responses = [reply.take(chunk(piece)) for piece in pieces]
    responses.append(reply.take(chunk("", last=True)))
    message = responses[-1].message
    assert message.content or content == ""
    assert "".join(each.delta or "" for each in responses) == content
    assert [name for name, _ in calls_of(responses[-1])] == calls
    thought = [block.content for block in message.blocks if isinstance(block, ThinkingBlock)]
    assert thought == [thinking] * bool(thinking)
    deltas = [each.additional_kwargs.get("thinking_delta", "") for each in responses]
    assert "".join(deltas) == thinking
    extras = message.additional_kwargs.get("tool_calls", [])
    assert [json.loads(each["function"]["arguments"]) for each in extras] == [
        arguments for _, arguments in calls_of(responses[-1])
    ]


# Without enforcement -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_malformed_call_stays_in_the_text_with_the_reason(way):
    with scripted_engine(lambda _: "<tool_call>\nadd(12, 7)\n</tool_call>") as engine:
        llm = AdaFuseLLM(engine=engine, enforce=False)
        *_, last = await with_tools(llm, way, tools=[ADD], user_msg="12 plus 7?")
    assert "add(12, 7)" in (last.message.content or "")
    assert "not JSON" in last.additional_kwargs["adafuse_warnings"][0]
    with pytest.raises(MalformedReplyError, match="calls no tool"):
        llm.get_tool_calls_from_response(last)


# Programs and selectors --------------------------------------------------------------------------


async def test_pydantic_selectors(stubborn_llm):
    single = PydanticSingleSelector.from_defaults(llm=stubborn_llm)
    choices = ["prices of bread", "history of ships"]
    for result in (single.select(choices, "When?"), await single.aselect(choices, "When?")):
        assert isinstance(result.ind, int)
        assert isinstance(result.reason, str)
    multi = PydanticMultiSelector.from_defaults(llm=stubborn_llm)
    assert all(isinstance(index, int) for index in multi.select(choices, "When?").inds)


class Point(BaseModel):
    """A point."""

    x: int
    y: int


async def test_a_function_calling_program():
    def script(prompt: str) -> str:
        return written_call("Point", x=3, y=4)

    with scripted_engine(script) as engine:
        program: Any = FunctionCallingProgram.from_defaults(
            output_cls=Point,
            prompt_template_str="A point: {which}",
            llm=AdaFuseLLM(engine=engine, max_words=1),
        )
        assert program(which="any") == Point(x=3, y=4)
        assert await program.acall(which="any") == Point(x=3, y=4)
        shown = list(program.stream_call(which="any"))
        assert shown[-1] == Point(x=3, y=4)
        assert any(getattr(each, "y", None) is None for each in shown[:-1])
        again = [each async for each in await program.astream_call(which="any")]
        assert again[-1] == Point(x=3, y=4)


# predict_and_call --------------------------------------------------------------------------------


async def predicted(llm: Any, asynchronous: bool, tools: Sequence[Any], *args: Any, **kwargs: Any):
    if asynchronous:
        return await llm.apredict_and_call(tools, *args, **kwargs)
    return llm.predict_and_call(tools, *args, **kwargs)


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_tools_are_predicted_and_called(llm, asynchronous):
    question = "Do both: 12 plus 7, greet."
    response = await predicted(
        llm, asynchronous, [ADD, GREET], question, allow_parallel_tool_calls=True
    )
    assert response.response == "19\n\nGood day, Zoë."
    assert [source.tool_name for source in response.sources] == ["add", "greet"]
    response = await predicted(llm, asynchronous, [ADD, GREET], question)
    assert [source.tool_name for source in response.sources] == ["add"]
    with pytest.raises(MalformedReplyError, match="calls no tool"):
        await predicted(llm, asynchronous, [ADD], "What can you do?")
    response = await predicted(
        llm, asynchronous, [ADD], "What can you do?", error_on_no_tool_call=False
    )
    assert (response.response, response.sources) == ("I only add.", [])
