"""Tool descriptions and system messages of agents."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from adafuse_llm.embedded.tools import CALCULATE, LOOK_UP
from adafuse_llm.text.chat import Tool
from training.dialogues import Form

_OTHER_TOOLS: Final = (
    ("send_mail", "Send a letter to a person.", "text"),
    ("translate", "Translate a text.", "text"),
    ("weather", "The weather of a place.", "place"),
    ("play_music", "Play a piece of music.", "title"),
    ("set_alarm", "Set an alarm.", "time"),
    ("draw_map", "Draw a map of a place.", "place"),
)
_OTHER_WORDS: Final = {
    "look_up": (
        "Search the handbook for a name.",
        "Look up a name in the handbook.",
        "What the documents say about a person, place, product or event.",
    ),
    "calculate": (
        "Calculate a sum.",
        "Work out a sum such as 3 * 4.50 + 2.",
        "A calculator for numbers.",
    ),
}
SHORT_SYSTEMS: Final[Mapping[Form, str]] = {
    "tool calls": "To call a tool, look_up or calculate, write its name and arguments as JSON.",
    "ReAct": "Write Thought, Action (look_up, calculate) and Action Input, or Thought and Answer.",
}
AGENT_SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You answer questions about a town. Use your tools.",
    "Give short answers.",
    "You are an agent with tools. Look up what you do not know.",
)


def draw_tools(rng: random.Random) -> list[Tool]:
    """Draw descriptions of the two tools, and sometimes of a third one.

    Their order, wording and schemas vary.
    """
    tools = [LOOK_UP, CALCULATE]
    for place, tool in enumerate(tools):
        if rng.random() < 0.2:
            tools[place] = replace(tool, description=rng.choice(_OTHER_WORDS[tool.name]))
    if rng.random() < 0.25:
        name, description, argument = rng.choice(_OTHER_TOOLS)
        schema = {
            "properties": {argument: {"type": "string"}},
            "required": [argument],
            "type": "object",
        }
        tools.append(Tool(name, description, schema))
    rng.shuffle(tools)
    style = rng.random()
    if style < 0.35:
        tools = [_with_title(tool) for tool in tools]
    if style < 0.2:
        tools = [_with_signature(tool) for tool in tools]
    return tools


def _with_title(tool: Tool) -> Tool:
    """Give the argument a title, as pydantic does."""
    ((name, schema),) = tool.parameters["properties"].items()
    titled = {name: {"title": name.title(), **schema}}
    return replace(tool, parameters={**tool.parameters, "properties": titled})


def _with_signature(tool: Tool) -> Tool:
    """Put the function's signature before the description, as LlamaIndex does."""
    (argument,) = tool.parameters["properties"]
    signature = f"{tool.name}({argument}: str) -> str"
    return replace(tool, description=f"{signature}\n{tool.description}")
