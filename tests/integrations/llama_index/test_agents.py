"""Agents over members that write what a script says: they run to their end."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.react import ReActChatFormatter
from llama_index.core.agent.react.prompts import REACT_CHAT_SYSTEM_HEADER
from llama_index.core.agent.workflow import (
    AgentStream,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import WorkflowRuntimeError
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import AdaFuseEngine, MalformedReplyError
from adafuse_llm.embedded.tools import REACT_HEADER
from tests.support.instruction_follower import call as written_call
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


@pytest.fixture(scope="module")
def llm():
    with scripted_engine(react) as engine:
        yield AdaFuseLLM(engine=engine, enforce=False)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_tool_is_not_called_with_what_the_limit_cuts(streaming, tmp_path):
    def save_note(text: str = "") -> str:
        """Save a note."""
        (tmp_path / "note.txt").write_text(text, encoding="utf-8")
        return "Saved."

    story = written_call("save_note", text="A fox. " * 40)
    for enforce in ("auto", False):
        with scripted_engine(lambda _: story) as engine:
            llm = AdaFuseLLM(engine=engine, max_new_tokens=120, enforce=enforce)
            tool = FunctionTool.from_defaults(save_note)
            agent = FunctionAgent(tools=[tool], llm=llm, streaming=streaming)
            if enforce:
                with pytest.raises(MalformedReplyError, match="max_tokens"):
                    await agent.run("Save a story.")
                with pytest.raises(MalformedReplyError, match="max_tokens"):
                    await llm.apredict_and_call([tool], "Save a story.")
            with pytest.raises(MalformedReplyError, match="max_tokens"):
                llm.get_tool_calls_from_response(llm.chat_with_tools([tool], "Save a story."))
    step = 'Action: save_note\nAction Input: {"text": "A fox.", "more": "{red} ' + "x" * 99
    with scripted_engine(lambda _: f"Thought: I save it.\n{step}") as engine:
        react_llm = AdaFuseLLM(engine=engine, max_new_tokens=115, enforce=False)
        react_agent = ReActAgent(tools=[tool], llm=react_llm, streaming=streaming)
        with pytest.raises(WorkflowRuntimeError, match="iterations"):
            await react_agent.run("Save a story.", max_iterations=2)
    assert not list(tmp_path.iterdir())


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
async def test_a_reply_to_a_react_agent_ends_before_an_observation(llm, path, header):
    formatter = ReActChatFormatter.from_defaults(system_header=header, context="You add.")
    asked = formatter.format([TOOL], [ChatMessage("12 plus 7?")])
    assert (await ask(llm, path, asked)).text == CALL
    assert (await ask(llm, path, asked, stop="12")).text == CALL.partition("12")[0]
    configured = AdaFuseEngine(llm.engine.backends, llm.engine.config.override({"stop": "12"}))
    assert (await ask(AdaFuseLLM(engine=configured), path, asked)).text.endswith(': {"a": ')
    assert (await ask(llm, path, asked[1:])).text == CALL + MADE_UP
    without = AdaFuseLLM(engine=llm.engine, react_stop=False)
    assert (await ask(without, path, asked)).text == CALL + MADE_UP


TOOL = FunctionTool.from_defaults(add)
