"""The embedded members call functions, end to end."""

import pytest
from llama_index.core.agent.react import ReActChatFormatter
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent, ToolCallResult
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm.embedded.tools import REACT_HEADER, calculate, look_up

pytestmark = pytest.mark.disable_socket

FORMATTER = ReActChatFormatter.from_defaults(system_header=REACT_HEADER)


@pytest.mark.parametrize("kind", [FunctionAgent, ReActAgent])
async def test_an_agent_calls_the_tools_that_lead_to_the_answer(kind):
    llm = AdaFuseLLM.from_embedded(max_new_tokens=160)
    fields = {"formatter": FORMATTER} if kind is ReActAgent else {}
    agent = kind(tools=[look_up, calculate], llm=llm, **fields)
    handler = agent.run("How much do 3 tickets for the Silesse Mill cost?")
    results = [e async for e in handler.stream_events() if type(e) is ToolCallResult]
    assert [(each.tool_name, each.tool_kwargs) for each in results] == [
        ("look_up", {"query": "Silesse Mill"}),
        ("calculate", {"expression": "3 * 19.88"}),
    ]
    assert str(await handler) == "59.64 crowns"
    llm.unload()
