"""OpenAI's Agents SDK against a server: tools, streams, structured output, with both APIs.

Usage: python openai_agents.py ADDRESS
"""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
computed: list[str] = []


@function_tool
def calculate(expression: str) -> str:
    """Compute a number."""
    computed.append(expression)
    return "1364"


class Price(BaseModel):
    florins: int


async def converse(model):
    settings = ModelSettings(max_tokens=200)
    agent = Agent("clerk", "Be brief.", model=model, tools=[calculate], model_settings=settings)
    computed.clear()
    result = await Runner.run(agent, "What is 31 * 44?")
    assert computed == ["31 * 44"], computed
    assert result.final_output == "It is 1364.", result
    assert result.context_wrapper.usage.output_tokens > 0
    history = [*result.to_input_list(), {"role": "user", "content": "Hello!"}]
    again = await Runner.run(agent, history)
    assert again.final_output == "Good day.", again
    streamed = Runner.run_streamed(agent, "What is 31 * 44?")
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas).endswith("It is 1364."), deltas
    assert streamed.final_output == "It is 1364."
    priced = Agent("clerk", model=model, output_type=Price, model_settings=settings)
    price = await Runner.run(priced, "What is the price?")
    assert price.final_output == Price(florins=4), price


async def main():
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        await converse(kind("adafuse", openai_client=CLIENT))
    print("done")


asyncio.run(main())
