"""One step of a ReAct agent, with its tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.llms import LLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import BaseTool, adapt_to_async_tool
from llama_index.core.tools.calling import acall_tool_with_selection
from llama_index.core.workflow import Context

from adafuse_llm import MalformedReplyError


async def step_and_call(
    llm: LLM,
    tools: Sequence[BaseTool],
    messages: list[ChatMessage],
    agent_options: dict[str, Any],
    retries: int,
    *,
    verbose: bool = False,
) -> AgentChatResponse:
    """Run one step of the agent and call the tools that it selects.

    Args:
        llm: the LLM that writes the step.
        tools: tools that the step can call.
        messages: the conversation.
        agent_options: any of `react_chat_formatter`, `output_parser`, `tool_retriever` and
            `memory`.
        retries: how often to request another step if a step cannot be parsed.
        verbose: whether to print calls and their results.

    Raises:
        MalformedReplyError: no step can be parsed.
    """
    memory = agent_options.pop("memory", None) or ChatMemoryBuffer.from_defaults()
    if (formatter := agent_options.pop("react_chat_formatter", None)) is not None:
        agent_options["formatter"] = formatter
    agent = ReActAgent(
        tools=list(tools), llm=llm, streaming=False, verbose=verbose, **agent_options
    )
    callable_tools = [adapt_to_async_tool(tool) for tool in tools]
    if (retriever := agent_options.get("tool_retriever")) is not None:
        callable_tools += [
            adapt_to_async_tool(tool)
            for tool in await retriever.aretrieve(str(messages[-1].content))
        ]
    for _ in range(retries + 1):
        step = await agent.take_step(Context(agent), messages, callable_tools, memory)
        if not step.retry_messages:
            break
        messages = [*messages, *step.retry_messages]
    else:
        raise MalformedReplyError(
            f"no reply was a valid agent step in {retries + 1} attempts; the last reply: "
            f"{step.response.content!r}"
        )
    outputs = [
        await acall_tool_with_selection(call, callable_tools, verbose=verbose)
        for call in step.tool_calls
    ]
    if outputs:
        return AgentChatResponse("\n\n".join(output.content for output in outputs), outputs)
    return AgentChatResponse(_final_response(agent, step.response.content or ""))


def _final_response(agent: ReActAgent, reply: str) -> str:
    """Return the agent's response from a step that calls no tool."""
    parsed = agent.output_parser.parse(reply)
    return str(getattr(parsed, "response", reply))
