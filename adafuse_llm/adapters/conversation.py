"""Convert the conversations of frameworks into those of the engine.

Tools, calls and results keep their structure, so that the chat template of each member can write
them in the format that this member knows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import TypedDict

from adafuse_llm.adapters.reply import read_json
from adafuse_llm.text.conversation import (
    CALL_CLOSES,
    CALL_OPENS,
    RESULT_CLOSES,
    RESULT_OPENS,
    Conversation,
    MessageCall,
    Tool,
    check_content,
    check_conversation,
    check_role,
    function_of,
    to_json,
)
from adafuse_llm.text.reasoning import split_reasoning

logger = logging.getLogger(__name__)


class Turn(TypedDict, total=False):
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool`` (the result of a call), or another
            framework's name for one of these roles.
        content: text, or a list of parts. Members read a note in place of a part without text, such
            as ``{"type": "image"}``. In an assistant's message, such a part is left out.
        name: in a user's message, the speaker's name, which members read before the content; in a
            tool's message, the tool's name, which they read only if the message becomes text.
        tool_calls: calls in an assistant's message. The arguments can be JSON text. If a call has
            no name, or its arguments are not a JSON object, for example because they were cut off,
            members read the call and its result as text.
        tool_call_id: in a tool's message, the id of the call that the message answers. Without an
            id, it answers the last reply's first call without a result. If the call is missing,
            members read the message as text.
        reasoning: in an assistant's message, the reasoning before the content. If it is None, text
            between ``<think>`` and ``</think>`` at the beginning of the content is the reasoning.
    """

    role: str
    content: str | list[Any] | None
    name: str | None
    tool_calls: Sequence[Mapping[str, Any]] | None
    tool_call_id: str | None
    reasoning: str | None


def to_conversation(
    turns: Iterable[Turn],
    *,
    tools: Sequence[Tool] = (),
    tool_choice: str = "auto",
    instructions: str = "",
    warn: Callable[[str], object] = logger.warning,
) -> Conversation:
    """Convert a conversation for ``AdaFuseEngine.generate(messages=...)``.

    The reasoning of assistant turns becomes ``reasoning_content``, which members see only if their
    chat templates read it. `warn` receives a sentence about calls and results that members read as
    text, and one about parts without text. The other arguments are those of `check_conversation`.

    Raises:
        InvalidInputError: a message or tool cannot be used, as for `check_conversation`.
    """
    calls = _Calls()
    messages = [_to_message(number, turn, calls) for number, turn in enumerate(turns)]
    if calls.odd:
        warn(f"the messages have {' and '.join(calls.odd)}. Members read them as text.")
    if calls.unread:
        kinds = ", ".join(sorted(calls.unread))
        warn(f"members read only text, so other parts of messages are left out: {kinds}")
    return check_conversation(messages, tools, tool_choice, instructions=instructions)


@dataclass
class _Calls:
    """The calls of a conversation so far, and what a warning must mention.

    Attributes:
        names: by the id of a call, the name of its tool.
        text: the ids of the calls that members read as text.
        waiting: the ids of the last reply's calls that have no result yet.
        odd: which kinds of calls and results members read as text; the keys are an ordered set.
        unread: the types of parts without text.
    """

    names: dict[str, Any] = field(default_factory=dict)
    text: set[str] = field(default_factory=set)
    waiting: list[str] = field(default_factory=list)
    odd: dict[str, None] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)

    def texts(self, part: Any, role: str) -> list[Any]:
        """Return a list of the part. A part without text becomes a note or, in a reply, nothing."""
        if not isinstance(part, Mapping) or isinstance(part.get("text"), str):
            return [part]
        kind = str(part.get("type"))[:100]
        self.unread.add(kind)
        return [] if role == "assistant" else [f"[{kind}, not shown]"]

    def add(self, call: Any) -> MessageCall | str:
        """Record a call. Return it, or text if it has no name or its arguments are no object."""
        function, key = function_of(call), isinstance(call, Mapping) and call.get("id")
        key = str(key or f"call_{len(self.names)}")
        name, arguments = function.get("name"), function.get("arguments")
        self.names[key] = name
        self.waiting.append(key)
        self.text.discard(key)  # clients may use an id again
        values = arguments
        if isinstance(arguments, str):
            with suppress(ValueError):
                values = read_json(arguments or "{}")
        values = {} if values is None else values
        if isinstance(name, str) and isinstance(values, Mapping):
            return {"id": key, "name": name, "arguments": {**values}}
        self.text.add(key)
        self.odd["tool calls whose arguments are not a JSON object"] = None
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
        text = text.removeprefix(CALL_OPENS).strip()
        if name and '"name"' not in text:  # the name can be apart from the text or in it
            text = f'{{"name": {json.dumps(name)}, "arguments": {text}}}'
        return f"{CALL_OPENS}\n{text}\n{CALL_CLOSES}"

    def answer(self, key: object) -> tuple[str, bool]:
        """Return the id of the call that a result answers, and whether the result becomes text."""
        key = str(key or next(iter(self.waiting), ""))
        if key in self.waiting:
            self.waiting.remove(key)
        if key not in self.names:
            self.odd["results of calls that are missing"] = None
        return key, key in self.text or key not in self.names


def _to_message(number: int, turn: Turn, known: _Calls) -> dict[str, Any]:
    label = f"message {number}"
    role = check_role(turn.get("role"), label)
    content: Any = turn.get("content")
    if isinstance(content, (list, tuple)):
        content = [text for part in content for text in known.texts(part, role)]
    content = check_content(content, label, role)
    reasoning = turn.get("reasoning")
    if role == "assistant" and reasoning is None:
        reasoning, content = split_reasoning(content)
    elif role == "user" and (name := turn.get("name")):
        content = f"{name}: {content}"
    message: dict[str, Any] = {"role": role, "content": content}

    # malformed calls become text at the end of the content
    calls = turn.get("tool_calls")
    if calls and role == "assistant" and isinstance(calls, (list, tuple)):
        known.waiting.clear()
        read = [known.add(call) for call in calls]
        calls = [call for call in read if not isinstance(call, str)]
        if texts := [call for call in read if isinstance(call, str)]:
            message["content"] = "\n".join([*filter(None, [content.rstrip("\n")]), *texts])
    if calls:
        message["tool_calls"] = calls

    # a result becomes text if its call did, or if its call is missing
    if role == "tool":
        key, is_text = known.answer(turn.get("tool_call_id"))
        if is_text:
            name = known.names.get(key) or turn.get("name")
            answer = {"name": name, "content": content} if name else {"content": content}
            written = to_json(answer).replace("</", r"<\/")  # no result can end its block
            text = f"{RESULT_OPENS}\n{written}\n{RESULT_CLOSES}"
            return {"role": "user", "content": text}
        message["tool_call_id"] = key
    if role == "assistant" and reasoning:
        message["reasoning_content"] = reasoning
    return message
