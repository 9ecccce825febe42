"""Conversations, and the common forms in which members read them and write calls.

A member reads a conversation with its own chat template (`adafuse_llm.text.templates`). A member
without one reads the *plain format*: the system text, and a paragraph per turn with its role::

    Answer briefly.

    User: Who founded the mill?

    Assistant:

All members write the same reply, so they write calls in the same form. A member whose template does
not support tools also reads calls and results in this form (`Conversation.flat`)::

    assistant   <tool_call>
                {"name": "add", "arguments": {"a": 1, "b": 2}}
                </tool_call>
    user        <tool_response>
                {"name": "add", "content": "3"}
                </tool_response>
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import NotRequired, TypedDict

from adafuse_llm.errors import (
    InvalidInputError,
    InvalidOptionError,
    nearest,
    short_list,
    short_repr,
)
from adafuse_llm.text.reasoning import REASONING_OPENS
from adafuse_llm.text.words import check_text

ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {
    "developer": "system",
    "human": "user",
    "ai": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function": "tool",
}

CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
RESULT_OPENS, RESULT_CLOSES = "<tool_response>", "</tool_response>"

# only messages of this role can have the key
_OWNERS = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}

TOOL_CHOICES = ("auto", "none", "required")

TOOLS = """\
# Tools

You have these tools, one in a line, with a JSON schema of their arguments:"""

HOW_TO_CALL = f"""\
To call a tool, end your reply with its name and its arguments as JSON, in this form:

{CALL_OPENS}
{{"name": "the tool's name", "arguments": {{"the argument's name": "its value"}}}}
{CALL_CLOSES}

To call several tools, write one such block after the other."""

WHERE_RESULTS_COME = (
    f" Their results come in the next message, each between {RESULT_OPENS} and {RESULT_CLOSES}."
)

ONLY_THIS_FORM = (
    " Write calls only in this form, even if other instructions or earlier calls use another form."
)

AUTO = "Call a tool only where it helps; otherwise, answer directly."
REQUIRED = "This time, your reply must call at least one tool."
NAMED = "This time, your reply must call the tool {name}."


class MessageCall(TypedDict):
    """A tool call by the assistant. The message with its result refers to the call by `id`."""

    id: str
    name: str
    arguments: dict[str, Any]


class Message(TypedDict):
    """A checked message of a conversation.

    Attributes:
        role: one of `ROLES`.
        content: the text of the message.
        tool_calls: an assistant's calls, at least one.
        tool_call_id: the id of the call that a tool answers.
        reasoning_content: an assistant's reasoning before the content. Some chat templates read it.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[MessageCall]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


@dataclass(frozen=True)
class Tool:
    """A tool that members can call.

    Attributes:
        name: name by which a call selects the tool.
        description: what the tool does.
        parameters: a JSON schema of the arguments.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A checked conversation. Use `check_conversation` to create one.

    Attributes:
        messages: at least one message.
        tools: the tools that the next reply can call, each with a different name.
        tool_choice: ``"auto"``, ``"required"`` for a call of any tool, or the name of one tool.
        instructions: text that follows the system message and the tools.
        continues: whether the reply continues the last message (`continued`).
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    instructions: str = ""
    continues: bool = False

    @property
    def has_tools(self) -> bool:
        """Whether the conversation has tools, calls or results of calls."""
        return bool(self.tools) or any(
            "tool_calls" in message or "tool_call_id" in message for message in self.messages
        )

    @property
    def begun(self) -> str:
        """The text that the reply continues; empty if it begins a new message."""
        return self.messages[-1]["content"] if self.continues else ""

    def continued(self) -> Conversation:
        """Return this conversation for a reply that continues its last message.

        If this message has only reasoning, the reply continues the reasoning.

        Raises:
            InvalidInputError: the last message is not an assistant's, or has tool calls or no text.
        """
        last: Message = {**self.messages[-1]}
        reasoning = last.get("reasoning_content", "")
        if not last["content"].strip() and reasoning.strip():
            last["content"] = f"{REASONING_OPENS}\n{reasoning.lstrip()}"
            del last["reasoning_content"]
        if last["role"] != "assistant" or "tool_calls" in last or not last["content"].strip():
            calls = " with tool calls" if "tool_calls" in last else ""
            empty = "" if last["content"].strip() else " without text"
            raise InvalidInputError(
                "continue_final_message needs an assistant message with text and without tool "
                f"calls at the end; the last message has the role {last['role']!r}{calls}{empty}"
            )
        return replace(self, messages=(*self.messages[:-1], last), continues=True)

    def before_reply(self) -> Conversation:
        """Return the conversation without its last message, but with at least an empty one."""
        nothing: Message = {"role": "user", "content": ""}
        return replace(self, messages=self.messages[:-1] or (nothing,), continues=False)

    def with_last(self, content: str) -> Conversation:
        """Return the conversation with other content in its last message."""
        last: Message = {**self.messages[-1], "content": content}
        return replace(self, messages=(*self.messages[:-1], last))

    @property
    def request(self) -> str:
        """The sentence that asks members for a call; empty if they are free to call or not."""
        if not self.tools or self.tool_choice == "auto":
            return ""
        if self.tool_choice == "required":
            return REQUIRED
        return NAMED.format(name=self.tool_choice)

    @property
    def characters(self) -> int:
        """Approximate number of characters that members read."""
        return len(to_json([self.messages, [*map(vars, self.tools)], self.instructions]))

    def with_system(self, *texts: str) -> Conversation:
        """Append texts and the instructions to the system message at the start, or add one."""
        added = [text for text in (*texts, self.instructions) if text]
        if not added:
            return self
        has_system = self.messages[0]["role"] == "system"
        first = self.messages[0]["content"] if has_system else ""
        content = "\n\n".join([*filter(None, [first]), *added])
        system: Message = {"role": "system", "content": content}
        return replace(self, messages=(system, *self.messages[has_system:]), instructions="")

    def flat(self) -> list[Message]:
        """Return messages in which calls and results are text, for templates that read no tools.

        The first system message describes the tools.
        """
        names: dict[str, str] = {}  # maps the ids of calls to the tools' names
        flat: list[Message] = []
        follows_result = False  # results of consecutive messages share one user message
        for message in self.messages:
            role, content = message["role"], message["content"]
            key = message.get("tool_call_id")
            if key is not None:
                result = to_json({"name": names[key], "content": content})
                content = _block(RESULT_OPENS, result, RESULT_CLOSES)
                if follows_result:
                    content = f"{flat.pop()['content']}\n{content}"
                role = "user"
            elif calls := message.get("tool_calls"):
                names |= {call["id"]: call["name"] for call in calls}
                written = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
                blocks = [_block(CALL_OPENS, to_json(call), CALL_CLOSES) for call in written]
                # a call begins on a new line, as in members' replies
                content = "\n".join([*filter(None, [content.rstrip("\n")]), *blocks])
            plain: Message = {"role": role, "content": content}
            if thought := message.get("reasoning_content"):
                plain["reasoning_content"] = thought
            flat.append(plain)
            follows_result = key is not None
        system = []
        if self.tools:
            lines = "\n".join(to_json(vars(tool)) for tool in self.tools)
            system = [TOOLS, lines, f"{HOW_TO_CALL}{WHERE_RESULTS_COME} {self.request or AUTO}"]
        return [*replace(self, messages=tuple(flat)).with_system(*system).messages]

    def plain_text(self) -> str:
        """Return the conversation in the plain format, for members without a chat template."""
        parts = [
            message["content"]
            if message["role"] == "system"
            else f"{message['role'].capitalize()}: {message['content']}"
            for message in self.flat()
        ]
        return "\n\n".join(parts if self.continues else [*parts, "Assistant:"])


def check_conversation(
    messages: Sequence[Mapping[str, Any]] | Conversation,
    tools: Sequence[Tool | Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    *,
    instructions: str = "",
) -> Conversation:
    """Check messages and tools, and return their conversation. A `Conversation` stays as it is.

    Messages, `tools` and `tool_choice` are those of `Engine.generate`. The first system message
    ends in `instructions`.

    Raises:
        InvalidInputError: a message or tool has a wrong form; a result answers no earlier call; two
            tools have the same name; `tool_choice` does not fit `tools`; or there is no text.
    """
    if isinstance(messages, Conversation):
        if tools or tool_choice != "auto" or instructions:
            raise InvalidInputError(
                "a Conversation has its own tools and tool_choice: pass them to "
                "check_conversation, or pass messages as a list"
            )
        return messages
    _check_list(messages, "messages must be a list of {'role': ..., 'content': ...} dicts")
    checked = tuple(_check_message(number, message) for number, message in enumerate(messages))
    checked_tools = check_tools(tools)
    _check_tool_choice(checked_tools, tool_choice)
    if tool_choice == "none":
        checked_tools, tool_choice = (), "auto"
    check_text(instructions, "instructions")
    conversation = Conversation(checked, checked_tools, tool_choice, instructions.strip())
    if not checked:
        raise InvalidInputError("the list of messages is empty: pass at least one user message")
    # without tools and instructions, at least one message must have text
    if conversation.has_tools:
        check_results(checked)
    elif not instructions.strip() and not any(each["content"].strip() for each in checked):
        raise InvalidInputError(
            "messages have no text: pass a text, or at least one message with content"
        )
    return conversation


def _check_message(number: int, message: Any) -> Message:
    label = f"message {number}"
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidInputError(
            f"{label} must be a dict with 'role' and 'content'; got {message!r:.80}"
        )
    role = check_role(message["role"], label)
    unknown = message.keys() - Message.__annotations__.keys()
    if given := sorted(str(key) for key in unknown if message[key] is not None):
        raise InvalidInputError(
            f"{label} has {', '.join(map(repr, given))}; only "
            f"{', '.join(map(repr, Message.__annotations__))} are allowed. Put all text for the "
            "models into 'content'."
        )

    content = check_content(message.get("content"), label, role)
    checked: Message = {"role": role, "content": content}
    for name, owner in _OWNERS.items():
        if message.get(name) and role != owner:
            raise InvalidInputError(
                f"{label} has role {role!r}; only a message of role {owner!r} can have {name}"
            )
    if calls := message.get("tool_calls"):
        _check_list(calls, f"{label}: tool_calls must be a list of dicts with 'id' and 'name'")
        checked["tool_calls"] = [_check_call(call, label) for call in calls]
    if (key := message.get("tool_call_id")) is not None:
        checked["tool_call_id"] = str(key)
    if reasoning := check_content(message.get("reasoning_content"), f"the reasoning of {label}"):
        checked["reasoning_content"] = reasoning
    return checked


def _check_list(value: Any, wanted: str) -> None:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidInputError(f"{wanted}; got {type(value).__name__}")


def check_role(role: Any, what: str) -> str:
    """Return the role, one of `ROLES`, for a framework's name of it, such as ``human``."""
    known = _ALIASES.get(role, role) if isinstance(role, str) else role
    if not isinstance(known, str) or known not in ROLES:
        raise InvalidInputError(
            f"{what} has role {short_repr(known)}; allowed: {', '.join(ROLES)}."
            f"{nearest(str(known), ROLES)}"
        )
    return known


def check_content(content: Any, what: str, role: str = "") -> str:
    """Return the text of `content`, which is a text, a list of text parts, or None.

    Parts are pieces of one text, so nothing comes between them. Only the parts of a tool's result
    are separate values, so each begins a line.
    """
    if content is None:
        content = ""
    if isinstance(content, (list, tuple)):
        parts = [each.get("text") if isinstance(each, Mapping) else each for each in content]
        texts = [each for each in parts if isinstance(each, str)]
        if len(texts) < len(parts):
            raise InvalidInputError(
                f"{what} has a content part that is not text; only text is allowed"
            )
        content = ("\n" if role == "tool" else "").join(texts)
    if not isinstance(content, str):
        raise InvalidInputError(
            f"{what} has content of type {type(content).__name__}; only text is allowed"
        )
    check_text(content, what)
    return content


def function_of(tool: Any) -> Mapping[str, Any]:
    """Return the mapping with a tool's or call's name. OpenAI's form nests it in ``function``."""
    mapping: Mapping[str, Any] = tool if isinstance(tool, Mapping) else {}
    function = mapping.get("function")
    return function if isinstance(function, Mapping) else mapping


def _check_call(call: Any, label: str) -> MessageCall:
    function = function_of(call)
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(
                f"{label} calls {name!r} with arguments that are not JSON: {error}"
            ) from error
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise InvalidInputError(
            f"{label} has a tool call without a name or a mapping of arguments: {short_repr(call)}"
        )
    check_text(name, label)
    return {"id": str(call.get("id")), "name": name, "arguments": plain_json(arguments, label)}


def check_results(messages: Iterable[Message]) -> None:
    """Check that every result answers an earlier call."""
    ids: dict[str, None] = {}
    for number, message in enumerate(messages):
        ids |= dict.fromkeys(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and (key := message.get("tool_call_id")) not in ids:
            raise InvalidInputError(
                f"message {number} is the result of a call with id {short_repr(key)}, but no "
                "earlier assistant message has a call with that id. Ids of earlier calls: "
                f"{short_list(map(repr, ids))}"
            )


def check_tools(tools: Sequence[Tool | Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Check tools, which must have different names, and return them as `Tool` objects."""
    _check_list(tools, "tools must be a list of tools")
    checked = tuple(_check_tool(number, tool) for number, tool in enumerate(tools))
    counts = Counter(tool.name for tool in checked)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InvalidInputError(
            f"tools need different names; got {', '.join(twice)} more than once"
        )
    return checked


def _check_tool(number: int, given: Any) -> Tool:
    tool = given
    if isinstance(given, Mapping):
        function = function_of(given)
        tool = Tool(
            function.get("name", ""),
            function.get("description") or "",
            function.get("parameters") or {},
        )
    if (
        not isinstance(tool, Tool)
        or not (isinstance(tool.name, str) and tool.name)
        or not isinstance(tool.description, str)
        or not isinstance(tool.parameters, Mapping)
    ):
        raise InvalidInputError(
            f"tool {number} must be a Tool, or a dict with 'name', 'description' and 'parameters' "
            f"(a JSON schema); got {short_repr(given)}"
        )
    label = f"tool {tool.name!r}"
    check_text(tool.name, label)
    check_text(tool.description, label)
    return Tool(tool.name, tool.description, plain_json(tool.parameters, label))


def _check_tool_choice(tools: Sequence[Tool], choice: Any) -> None:
    names = [tool.name for tool in tools]
    allowed = [*TOOL_CHOICES, *names] if tools else ["auto", "none"]
    if choice not in allowed:
        advice = nearest(str(choice), names) if tools else " Pass tools for other choices."
        raise InvalidOptionError(
            f"option 'tool_choice' must be one of {short_list(allowed)}; got {short_repr(choice)}."
            f"{advice}"
        )


def _block(opens: str, text: str, closes: str) -> str:
    # JSON cannot contain a closing marker if its `</` is escaped
    escaped = text.replace("</", r"<\/")
    return f"{opens}\n{escaped}\n{closes}"


def to_json(value: Any) -> str:
    """Return a value as the JSON text that members read."""
    return json.dumps(value, ensure_ascii=False)


def plain_json(value: Any, label: str) -> Any:
    """Return JSON data as dicts, lists and plain values. Errors call it `label`."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_to_plain)
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{label} cannot be written as JSON: {error}") from error
    check_text(text, label)
    return plain


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} {value!r:.40} is not JSON")


def map_json(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON data with `change` applied to all its texts, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_json(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_json(each, change) for each in value]
    return value
