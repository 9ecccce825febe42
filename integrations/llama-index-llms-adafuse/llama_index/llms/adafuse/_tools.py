"""One step of a ReAct agent, and the tools that it calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.agent.workflow.agent_context import SimpleAgentContext
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.llms import LLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import BaseTool, adapt_to_async_tool
from llama_index.core.tools.calling import acall_tool_with_selection

from adafuse_llm import MalformedReplyError


async def step_and_call(
    llm: LLM,
    tools: Sequence[BaseTool],
    asked: list[ChatMessage],
    given: dict[str, Any],
    retries: int,
    *,
    verbose: bool = False,
) -> AgentChatResponse:
    """Play one step and call its tools.

    Args:
        llm: whose step it is.
        tools: what can be called.
        asked: the conversation.
        given: `react_chat_formatter`, `output_parser`, `tool_retriever`, `memory`, where said.
        retries: how often a step that cannot be read is asked for again.
        verbose: print calls and their results.

    Raises:
        MalformedReplyError: no step could be read.
    """
    memory = given.pop("memory", None) or ChatMemoryBuffer.from_defaults()
    if (formatter := given.pop("react_chat_formatter", None)) is not None:
        given["formatter"] = formatter
    agent = ReActAgent(tools=list(tools), llm=llm, streaming=False, verbose=verbose, **given)
    callable_tools = [adapt_to_async_tool(tool) for tool in tools]
    if (retriever := given.get("tool_retriever")) is not None:
        callable_tools += [
            adapt_to_async_tool(tool) for tool in await retriever.aretrieve(str(asked[-1].content))
        ]
    for _ in range(retries + 1):
        step = await agent.take_step(SimpleAgentContext(), asked, callable_tools, memory)
        if not step.retry_messages:
            break
        asked = [*asked, *step.retry_messages]
    else:
        raise MalformedReplyError(
            f"no step of the agent could be read in {retries + 1} attempts; the last reply: "
            f"{step.response.content!r}"
        )
    outputs = [
        await acall_tool_with_selection(call, callable_tools, verbose=verbose)
        for call in step.tool_calls
    ]
    if outputs:
        return AgentChatResponse("\n\n".join(output.content for output in outputs), outputs)
    return AgentChatResponse(_answer(agent, step.response.content or ""))


def _answer(agent: ReActAgent, reply: str) -> str:
    """The answer in a step that calls no tool."""
    read = agent.output_parser.parse(reply)
    return str(getattr(read, "response", reply))
