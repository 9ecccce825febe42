"""The embedded members as a ReAct agent of LlamaIndex, with real tools, end to end."""

from __future__ import annotations

import pytest
from llama_index.core.agent.react import ReActChatFormatter
from llama_index.core.agent.workflow import ReActAgent, ToolCallResult
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm.embedded.tools import REACT_HEADER, calculate, look_up
from tests.support.agent_questions import ERRANDS


@pytest.fixture(scope="module")
def embedded():
    llm = AdaFuseLLM.from_embedded(max_new_tokens=160)
    yield llm
    llm.unload()


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("question", "calls", "answer"), ERRANDS)
async def test_the_members_call_the_tools_that_lead_to_the_answer(
    embedded, streaming, question, calls, answer
):
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
