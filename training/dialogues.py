"""An agent's messages and replies, in the two forms that the members know.

    "tool calls"   the text form of `adafuse_llm.text.conversation.Conversation.flat`
    "ReAct"        thoughts, actions and observations, in the format of LlamaIndex's ReActAgent

`turns_of` returns the assistant's turns of a generated case.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, get_args

from adafuse_llm.adapters.conversation import Turn, to_conversation
from adafuse_llm.embedded.tools import CALCULATE, LOOK_UP, REACT_HEADER
from adafuse_llm.text.conversation import Message, MessageCall, Tool
from training.world.agent_cases import AgentCase, ToolUse

Form = Literal["tool calls", "ReAct"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)

ARGUMENTS: Final = {"look_up": "query", "calculate": "expression"}
THOUGHTS: Final = {"look_up": "I need to look this up.", "calculate": "I need to calculate this."}
LAST_THOUGHT: Final = "I can answer now."


def turns_of(
    case: AgentCase,
    form: Form,
    tools: Sequence[Tool],
    system: str = "",
    *,
    earlier: bool = False,
) -> list[tuple[list[Message], str]]:
    """Return the assistant's turns of ``case``, each as (messages before the turn, its text).

    Args:
        case: the question with its tool uses and answer.
        form: the text form of tool calls.
        tools: the tools that the system message describes.
        system: text before the tools in the system message. With ReAct, it is used only if there
            are no tools.
        earlier: whether to return the assistant's turns before the question too. With ReAct, they
            are never returned, because ReAct prompts contain them in another form.
    """
    if form == "ReAct":
        header = REACT_HEADER.format(
            tool_desc="\n".join(map(_describe, tools)),
            tool_names=", ".join(tool.name for tool in tools),
        )
        return _react_turns(case, header if tools else system)
    turns = _tool_turns(case, tools, system)
    return turns if earlier else turns[-len(case.uses) - 1 :]


def _tool_turns(
    case: AgentCase, tools: Sequence[Tool], system: str
) -> list[tuple[list[Message], str]]:
    turns: list[Turn] = [{"role": "system", "content": system}] if system else []
    for each in (*case.earlier, case):
        turns.append({"role": "user", "content": each.question})
        for use in each.uses:
            key = f"call-{len(turns)}"
            arguments = {ARGUMENTS[use.tool]: use.argument}
            call: MessageCall = {"id": key, "name": use.tool, "arguments": arguments}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
            turns.append({"role": "tool", "content": use.result, "tool_call_id": key})
        turns.append({"role": "assistant", "content": each.answer})
    messages = to_conversation(turns, tools=tools).flat()
    return [
        (messages[:place], message["content"])
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def _react_turns(case: AgentCase, header: str) -> list[tuple[list[Message], str]]:
    """Return the ReAct turns. All steps of an earlier question form one message."""
    messages: list[Message] = [{"role": "system", "content": header}]
    for each in case.earlier:
        steps = [text for use in each.uses for text in (_repeated_action(use), _observation(use))]
        messages.append({"role": "user", "content": each.question})
        messages.append({"role": "assistant", "content": "\n".join([*steps, _answer(each)])})
    messages.append({"role": "user", "content": case.question})
    turns = []
    for use in case.uses:
        turns.append((list(messages), _action(use)))
        messages.append({"role": "assistant", "content": _repeated_action(use)})
        messages.append({"role": "user", "content": _observation(use)})
    return [*turns, (messages, _answer(case))]


def _describe(tool: Tool) -> str:
    """Describe a tool in the way that LlamaIndex's ReAct formatter fills in ``{tool_desc}``."""
    return (
        f"> Tool Name: {tool.name}\nTool Description: {tool.description}\n"
        f"Tool Args: {json.dumps(tool.parameters)}\n"
    )


def _step(use: ToolUse, arguments: str) -> str:
    return f"Thought: {THOUGHTS[use.tool]}\nAction: {use.tool}\nAction Input: {arguments}"


def _action(use: ToolUse) -> str:
    return _step(use, json.dumps({ARGUMENTS[use.tool]: use.argument}))


def _repeated_action(use: ToolUse) -> str:
    """Write an action with a Python dictionary, as LlamaIndex repeats it in the next prompt."""
    return _step(use, str({ARGUMENTS[use.tool]: use.argument}))


def _observation(use: ToolUse) -> str:
    return f"Observation: {use.result}"


def _answer(case: AgentCase) -> str:
    return f"Thought: {LAST_THOUGHT}\nAnswer: {case.answer}"


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
