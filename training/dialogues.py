"""What an agent reads and writes, in the two forms that the members know.

    "tool calls"   the text form of `adafuse_llm.adapters.conversation.to_messages`
    "ReAct"        thoughts, actions and observations, as LlamaIndex's ReActAgent exchanges them

`turns_of` gives the assistant's turns of a generated case; `act` lets somebody answer a question
with the tools of `agents`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from adafuse_llm.adapters.conversation import Call, Turn, to_messages
from adafuse_llm.adapters.reply import ReplyParser, Text, ToolCall
from adafuse_llm.embedded.tools import REACT_HEADER, TOOLS, calculate, look_up
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.text.chat import Message, Tool
from training.world import AgentCase, ToolUse

__all__ = ["FORMS", "Form", "act", "is_same_turn", "read", "turns_of"]

Form = Literal["tool calls", "ReAct"]
FORMS: Final[tuple[Form, ...]] = ("tool calls", "ReAct")
MAX_USES: Final = 3

ARGUMENTS: Final = {"look_up": "query", "calculate": "expression"}
FUNCTIONS: Final[dict[str, Callable[..., str]]] = {"look_up": look_up, "calculate": calculate}
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
    """The assistant's turns of ``case``: the messages before each, and its text.

    ``system`` stands before the tools in the system message; where there are no ``tools``, it is
    all of it. ReAct has its own before tools. With ``earlier``, the turns before the question are
    among them, but for ReAct, which keeps them in another form.
    """
    if form == "ReAct":
        header = REACT_HEADER.format(
            tool_desc="\n".join(map(_described, tools)),
            tool_names=", ".join(tool.name for tool in tools),
        )
        return _react_turns(case, header if tools else system)
    turns = _tool_turns(case, tools, system)
    return turns if earlier else turns[-len(case.uses) - 1 :]


def read(text: str, form: Form) -> tuple[str, dict[str, Any]] | str:
    """What an assistant's turn says: a tool's name and arguments, or the answer.

    Raises:
        ValueError: it is neither.
    """
    if form == "ReAct":
        if call := re.search(r"Action: (\w+)\nAction Input: (\{.*\})", text):
            return call[1], dict(json.loads(call[2]))
        if answer := re.search(r"Answer: (.*)", text, re.DOTALL):
            return answer[1].strip()
        raise ValueError(f"neither an action nor an answer: {text!r:.80}")
    parser = ReplyParser(tools=True)
    parts = [*parser.feed(text), *parser.close()]
    for part in parts:
        if isinstance(part, ToolCall):
            return part.name, part.arguments
    said = "".join(part.text for part in parts if isinstance(part, Text)).strip()
    if not said:
        raise ValueError(f"neither a call nor an answer: {text!r:.80}")
    return said


def is_same_turn(said: str, expected: str, form: Form) -> bool:
    """Whether two turns call the same tool in the same way, or give the same answer."""
    try:
        return read(said, form) == read(expected, form)
    except ValueError:
        return False


def act(say: Callable[[list[Message]], str], form: Form, question: str) -> str | None:
    """Let ``say`` answer a question with the tools of `agents`; None where it does not get there.

    ``say`` gets the messages so far and returns the assistant's text.
    """
    uses: list[ToolUse] = []
    for _ in range(MAX_USES + 1):
        so_far = AgentCase(question, "", "both", tuple(uses))
        messages, _ = turns_of(so_far, form, TOOLS)[-1]
        try:
            step = read(say(messages), form)
            if isinstance(step, str):
                return step
            name, arguments = step
            tool = FUNCTIONS[name]
            uses.append(ToolUse(name, arguments[ARGUMENTS[name]], tool(**arguments)))
        except (ValueError, KeyError, TypeError, InvalidInputError):
            return None
    return None


def _tool_turns(
    case: AgentCase, tools: Sequence[Tool], system: str = ""
) -> list[tuple[list[Message], str]]:
    turns: list[Turn] = [{"role": "system", "content": system}] if system else []
    for each in (*case.earlier, case):
        turns.append({"role": "user", "content": each.question})
        for use in each.uses:
            key = f"call-{len(turns)}"
            arguments = {ARGUMENTS[use.tool]: use.argument}
            call: Call = {"id": key, "name": use.tool, "arguments": arguments}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
            turns.append({"role": "tool", "content": use.result, "tool_call_id": key})
        turns.append({"role": "assistant", "content": each.answer})
    messages = to_messages(turns, tools=tools)
    return [
        (messages[:place], message["content"])
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def _react_turns(case: AgentCase, header: str) -> list[tuple[list[Message], str]]:
    """An agent keeps what it did for an earlier question in one message."""
    messages: list[Message] = [{"role": "system", "content": header}]
    for each in case.earlier:
        steps = [text for use in each.uses for text in (_kept(use), _observation(use))]
        messages.append({"role": "user", "content": each.question})
        messages.append({"role": "assistant", "content": "\n".join([*steps, _answer(each)])})
    messages.append({"role": "user", "content": case.question})
    turns = []
    for use in case.uses:
        turns.append((list(messages), _action(use)))
        messages.append({"role": "assistant", "content": _kept(use)})
        messages.append({"role": "user", "content": _observation(use)})
    return [*turns, (messages, _answer(case))]


def _described(tool: Tool) -> str:
    """A tool as LlamaIndex's ReAct formatter puts it into ``{tool_desc}``."""
    return (
        f"> Tool Name: {tool.name}\nTool Description: {tool.description}\n"
        f"Tool Args: {json.dumps(tool.parameters)}\n"
    )


def _step(use: ToolUse, arguments: str) -> str:
    return f"Thought: {THOUGHTS[use.tool]}\nAction: {use.tool}\nAction Input: {arguments}"


def _action(use: ToolUse) -> str:
    return _step(use, json.dumps({ARGUMENTS[use.tool]: use.argument}))


def _kept(use: ToolUse) -> str:
    """An action as LlamaIndex writes it into the next prompt: a Python dictionary."""
    return _step(use, str({ARGUMENTS[use.tool]: use.argument}))


def _observation(use: ToolUse) -> str:
    return f"Observation: {use.result}"


def _answer(case: AgentCase) -> str:
    return f"Thought: {LAST_THOUGHT}\nAnswer: {case.answer}"
