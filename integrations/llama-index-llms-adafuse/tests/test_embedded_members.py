"""The embedded members answer, call functions, fill objects and choose, end to end."""

from __future__ import annotations

from typing import Literal

import pytest
from llama_index.core.agent.react import ReActChatFormatter
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import PromptTemplate
from llama_index.core.selectors import PydanticSingleSelector
from llama_index.core.tools import FunctionTool
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm.embedded.tools import REACT_HEADER, calculate, look_up

pytestmark = pytest.mark.disable_socket

QUESTION = """The Silesse Mill was founded by Jenbert Zalwyn and opens at 8:45.

Question: Who founded the Silesse Mill, and when does it open?"""

MILL = ("look_up", {"query": "Silesse Mill"})

ERRANDS = [
    ("Who is the director of the Silesse Mill?", [MILL], "Poris Wentano"),
    (
        "How much do 3 tickets for the Silesse Mill cost?",
        [MILL, ("calculate", {"expression": "3 * 19.88"})],
        "59.64 crowns",
    ),
    ("Hello.", [], "Hello. What would you like to know?"),
]


@pytest.fixture(scope="module")
def embedded():
    llm = AdaFuseLLM.from_embedded(max_new_tokens=160)
    yield llm
    llm.unload()


@pytest.fixture(scope="module")
def answers(embedded):
    """What a completion and a chat answer."""
    return {
        "complete": embedded.complete(f"{QUESTION}\nAnswer:").text,
        "chat": embedded.chat([ChatMessage(content=QUESTION)]).message.content,
    }


@pytest.mark.parametrize(
    ("way", "kind"),
    [("stream_", "complete"), ("a", "chat"), ("astream_", "complete"), ("astream_", "chat")],
)
async def test_every_entry_point_gives_the_same_answer(embedded, answers, way, kind):
    prompt = f"{QUESTION}\nAnswer:" if kind == "complete" else [ChatMessage(content=QUESTION)]
    given = getattr(embedded, f"{way}{kind}")(prompt)
    if way.startswith("a"):
        given = await given
    if way == "a":
        responses = [given]
    else:
        responses = [each async for each in given] if way == "astream_" else [*given]
        assert len(responses) > 1  # several spans
        assert "".join(each.delta for each in responses) == answers[kind]
    last = responses[-1]
    text = last.message.content if isinstance(last, ChatResponse) else last.text
    assert text == answers[kind]
    assert "Jenbert Zalwyn" in text
    assert set(last.raw.usage.members.prompt_tokens) == {"wren", "heron", "finch"}


@pytest.mark.parametrize(("question", "calls", "answer"), ERRANDS[1:])
async def test_a_react_agent_calls_the_tools_that_lead_to_the_answer(
    embedded, question, calls, answer
):
    streaming = bool(calls)
    agent = ReActAgent(
        tools=[look_up, calculate],
        llm=embedded,
        formatter=ReActChatFormatter.from_defaults(system_header=REACT_HEADER),
        streaming=streaming,
    )
    handler = agent.run(question)
    events = [event async for event in handler.stream_events()]
    results = [event for event in events if isinstance(event, ToolCallResult)]
    assert [(each.tool_name, each.tool_kwargs) for each in results] == calls
    assert str(await handler) == answer


@pytest.mark.parametrize(("question", "calls", "answer"), ERRANDS)
async def test_a_function_agent_calls_the_tools_that_lead_to_the_answer(
    embedded, question, calls, answer
):
    streaming = ERRANDS.index((question, calls, answer)) % 2 == 0
    agent = FunctionAgent(tools=[look_up, calculate], llm=embedded, streaming=streaming)
    handler = agent.run(question)
    results = [e async for e in handler.stream_events() if type(e) is ToolCallResult]
    assert [(each.tool_name, each.tool_kwargs) for each in results] == calls
    assert str(await handler) == answer


async def test_a_workflow_of_functions(embedded):
    workflow = AgentWorkflow.from_tools_or_functions([look_up, calculate], llm=embedded)
    assert isinstance(workflow.agents["Agent"], FunctionAgent)
    assert str(await workflow.run(user_msg=ERRANDS[0][0])) == ERRANDS[0][2]


def book(seats: int, window: bool) -> str:
    """Book seats."""
    return f"{seats} seats, window: {window}"


TOOLS = [FunctionTool.from_defaults(each) for each in (look_up, calculate, book)]


@pytest.mark.parametrize("choice", ["required", "book", "calculate"])
def test_any_call_can_be_required(embedded, choice):
    response = embedded.chat_with_tools(TOOLS, "Two seats, please.", tool_choice=choice)
    (call,) = embedded.get_tool_calls_from_response(response)
    (tool,) = [tool for tool in TOOLS if tool.metadata.name == call.tool_name]
    assert choice in ("required", call.tool_name)
    assert tool.metadata.fn_schema is not None
    tool.metadata.fn_schema.model_validate(call.tool_kwargs, strict=True)


class Visit(BaseModel):
    place: str
    guests: int
    day: Literal["Monday", "Friday"]


async def test_objects_that_the_members_never_saw(embedded):
    prompt = PromptTemplate("Plan a visit to {place}.")
    visit = embedded.structured_predict(Visit, prompt, place="the Silesse Mill")
    assert isinstance(visit, Visit)
    stream = await embedded.astream_structured_predict(Visit, prompt, place="the Silesse Mill")
    assert [each async for each in stream][-1] == visit


async def test_selectors(embedded):
    choices = ["prices", "history"]
    result = PydanticSingleSelector.from_defaults(llm=embedded).select(choices, "What?")
    assert isinstance(result.ind, int)
