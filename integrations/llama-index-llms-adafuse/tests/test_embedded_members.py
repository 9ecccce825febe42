"""The embedded members answer, call functions, fill objects and choose, end to end."""

from __future__ import annotations

from typing import Literal

import pytest
from llama_index.core.agent.react import ReActChatFormatter
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm.embedded.tools import REACT_HEADER, calculate, look_up

pytestmark = pytest.mark.disable_socket

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
