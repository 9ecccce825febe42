"""Agents over members that write what a script says: they run to their end."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from llama_index.core.agent.react import ReActChatFormatter
from llama_index.core.agent.react.prompts import REACT_CHAT_SYSTEM_HEADER
from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    CodeActAgent,
    ReActAgent,
    ToolCall,
    ToolCallResult,
)
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import AdaFuseEngine
from adafuse_llm.embedded.tools import REACT_HEADER
from tests.support.llama_calls import PATHS, ask, recorded
from tests.support.scripted import scripted_engine

STOP = ["\nObservation:"]
CALL = 'Thought: I have to add.\nAction: add\nAction Input: {"a": 12, "b": 7}'
MADE_UP = "\nObservation: 42\nThought: I can answer.\nAnswer: It is 42."


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def react(prompt: str) -> str:
    if "Observation: 19" in prompt:
        return "Thought: I can answer without using any more tools.\nAnswer: It is 19."
    return CALL + MADE_UP


def code(prompt: str) -> str:
    if "Result of executing the code given:\n\n19" in prompt:
        return "Together they are 19."
    return "Let me see.\n<execute>\nprint(add(12, 7))\n</execute>"


def two_agents(prompt: str) -> str:
    if "You carry bags" in prompt:
        handing = '{"to_agent": "Clerk", "reason": "it is about prices"}'
        return f"Thought: The clerk knows.\nAction: handoff\nAction Input: {handing}{MADE_UP}"
    if "Observation: 19" in prompt:
        return "Thought: I can answer.\nAnswer: The bread is 19 crowns."
    return CALL


@pytest.fixture(scope="module")
def llm():
    with scripted_engine(react) as engine:
        yield AdaFuseLLM(engine=engine, enforce=False)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("role", [MessageRole.USER, MessageRole.TOOL])
async def test_a_react_agent_is_stopped_before_what_it_makes_up(llm, streaming, role):
    formatter = ReActChatFormatter.from_defaults(observation_role=role)
    agent = ReActAgent(tools=[add], llm=llm, streaming=streaming, formatter=formatter)
    with recorded() as record:
        handler = agent.run("What is 12 plus 7?")
        events = [event async for event in handler.stream_events()]
        response: Any = await handler
    assert str(response) == "It is 19."
    (result,) = [event for event in events if isinstance(event, ToolCallResult)]
    assert (result.tool_kwargs, result.tool_output.content) == ({"a": 12, "b": 7}, "19")
    written = [event.text for event in record.named("AdaFuseGenerationEndEvent")]
    assert written[0] == CALL
    assert response.raw["summary"]["rounds"] > 0
    if streaming:
        shown: list[Any] = [event for event in events if isinstance(event, AgentStream)]
        assert "42" not in "".join(event.delta for event in shown)
        assert all(len(event.raw["rounds"]) == 1 for event in shown)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("header", [REACT_CHAT_SYSTEM_HEADER, REACT_HEADER])
@pytest.mark.parametrize("path", PATHS[4:])
async def test_l8_a_reply_to_a_react_agent_ends_before_an_observation(llm, path, header):
    formatter = ReActChatFormatter.from_defaults(system_header=header, context="You add.")
    asked = formatter.format([TOOL], [ChatMessage("12 plus 7?")])
    assert (await ask(llm, path, asked)).text == CALL
    assert (await ask(llm, path, asked, stop="12")).text == CALL.partition("12")[0]
    configured = AdaFuseEngine(llm.engine.backends, llm.engine.config.override({"stop": "12"}))
    assert (await ask(AdaFuseLLM(engine=configured), path, asked)).text.endswith(': {"a": ')
    assert (await ask(llm, path, asked[1:])).text == CALL + MADE_UP
    without = AdaFuseLLM(engine=llm.engine, react_stop=False)
    assert (await ask(without, path, asked)).text == CALL + MADE_UP


async def test_agents_hand_over_to_each_other():
    with scripted_engine(two_agents) as engine:
        llm = AdaFuseLLM(engine=engine)
        porter = ReActAgent(
            name="Porter",
            description="Carries bags.",
            system_prompt="You carry bags.",
            tools=[],
            llm=llm,
            can_handoff_to=["Clerk"],
        )
        clerk = ReActAgent(
            name="Clerk",
            description="Knows prices.",
            system_prompt="You know prices.",
            tools=[add],
            llm=llm,
        )
        workflow = AgentWorkflow(agents=[porter, clerk], root_agent="Porter")
        handler = workflow.run(user_msg="What does the bread cost?")
        calls = [e async for e in handler.stream_events() if type(e) is ToolCall]
        response: Any = await handler
    assert [call.tool_name for call in calls] == ["handoff", "add"]
    assert str(response) == "The bread is 19 crowns."
    assert response.current_agent_name == "Clerk"


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_code_act_agent(streaming):
    async def execute(code: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(code, {"add": add})
        return said.getvalue().strip()

    with scripted_engine(code) as engine:
        llm = AdaFuseLLM(engine=engine, stop=["Result of executing"])
        agent = CodeActAgent(code_execute_fn=execute, tools=[add], llm=llm, streaming=streaming)
        response = await agent.run("What is 12 plus 7?")
    assert str(response) == "Together they are 19."


# predict_and_call -------------------------------------------------------------------------------

TOOL = FunctionTool.from_defaults(add)


async def call(llm, asynchronous, *args, **kwargs):
    if asynchronous:
        return await llm.apredict_and_call(*args, **kwargs)
    return llm.predict_and_call(*args, **kwargs)


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_react_step_calls_a_tool(llm, asynchronous):
    response = await call(llm, asynchronous, [TOOL], "What is 12 plus 7?")
    assert response.response == "19"
    assert [source.raw_input["kwargs"] for source in response.sources] == [{"a": 12, "b": 7}]


# Messages of agents that call functions ---------------------------------------------------------


def test_calls_and_results_in_a_history_are_read_by_every_member():
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return "Yes."

    block = ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs={"a": 12, "b": 7})
    with scripted_engine(script) as engine:
        AdaFuseLLM(engine=engine).chat(
            [
                ChatMessage("12 plus 7?"),
                ChatMessage(role="assistant", blocks=[TextBlock(text="Let me see."), block]),
                ChatMessage(role="tool", content="19", additional_kwargs={"tool_call_id": "1"}),
                ChatMessage("Sure?"),
            ]
        )
    read = [text for text in seen if "Sure?" in text]
    assert len({*read}) == 2
    for text in read:
        assert text.index('{"name": "add", "arguments": {"a": 12, "b": 7}}') < text.index("19")
