"""Conversations with tools in the form of a member's own chat template.

Templates that support tools differ in what they accept. For example, some need arguments as a dict
and others as JSON text; some allow only one call per message; some omit the text before a call. A
`ToolForm` describes what one template accepts. `find_form` finds it by rendering a short
conversation, so it needs no list of model families.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

from adafuse_llm.text.chat import Template, Tool, default_system, fold_system, merge_turns
from adafuse_llm.text.conversation import (
    HOW_TO_CALL,
    ONLY_THIS_FORM,
    Call,
    ChatMessage,
    Conversation,
    calls_in,
    to_json,
)

ToolTemplate = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""A function that renders messages and tools up to the start of the assistant's reply."""


TextPlace = Literal["same message", "own message", "omitted"]


@dataclasses.dataclass(frozen=True)
class ToolForm:
    """How a chat template accepts tool calls and their results.

    Attributes:
        text: whether the text before a call is content of the same message, a message of its own,
            or omitted.
        is_nested: whether a call is ``{"id": ..., "type": "function", "function": {"name": ...}}``,
            as in OpenAI's API. Otherwise, it is ``{"id": ..., "name": ...}``.
        has_json_text: whether a call's arguments are JSON text. Otherwise, they are a dict.
        is_parallel: whether a message can have several calls. Otherwise, each call is a message of
            its own, and its result follows it.
        has_no_content: whether a message that has calls and no text has content of None. Otherwise,
            it has empty text.
        is_common: whether the template writes calls in the common form of replies.
    """

    text: TextPlace = "same message"
    is_nested: bool = True
    has_json_text: bool = False
    is_parallel: bool = True
    has_no_content: bool = False
    is_common: bool = False


TEXT_PLACES: tuple[TextPlace, ...] = ("same message", "own message", "omitted")

FORMS = tuple(
    ToolForm(text, is_nested, has_json_text, is_parallel, has_no_content)
    for text, is_nested, has_json_text, is_parallel, has_no_content in itertools.product(
        TEXT_PLACES, (True, False), (False, True), (True, False), (False, True)
    )
)
"""All forms, in the order in which `find_form` tries them. Forms that omit text come last."""

PROBE = Conversation(
    messages=(
        {"role": "user", "content": "word1word"},
        {
            "role": "assistant",
            "content": "word2word",
            "tool_calls": [
                {
                    "id": "1",
                    "name": "name1name",
                    "arguments": {"key1key": "word3word", "key2key": True},
                },
                {"id": "2", "name": "name2name", "arguments": {}},
            ],
        },
        {"role": "tool", "content": "word4word", "tool_call_id": "1"},
        {"role": "tool", "content": "word5word", "tool_call_id": "2"},
        {"role": "assistant", "content": "word6word"},
        {"role": "user", "content": "word7word"},
    ),
    tools=(
        Tool(
            "name1name",
            "word8word",
            {
                "type": "object",
                "properties": {"key1key": {"type": "string"}, "key2key": {"type": "boolean"}},
            },
        ),
        Tool("name2name", "word9word", {"type": "object", "properties": {}}),
    ),
)
"""A short conversation with everything that a form is about."""


def find_form(template: ToolTemplate) -> ToolForm | None:
    """Return the form that a template accepts, or None if it does not support tools.

    Args:
        template: function that renders messages and tools. It may raise any exception.
    """
    tools = _tools(PROBE)
    text = _try(template, [{"role": "user", "content": "word7word"}], tools)
    if not all(tool.name in text and tool.description in text for tool in PROBE.tools):
        return None
    for form in FORMS:
        text = _try(template, _messages(PROBE.messages, form), tools)
        if _shows_probe(text, form):
            return dataclasses.replace(form, is_common=_shows_common_calls(text))
    return None


def _shows_probe(text: str, form: ToolForm) -> bool:
    """Return whether a rendered `PROBE` has its texts, tools, calls and results."""
    words = {f"word{number}word" for number in range(1, 10)}
    if form.text == "omitted":
        words -= {"word2word"}
    return (
        all(word in text for word in (*words, "key2key"))
        and all(text.count(tool.name) > 1 for tool in PROBE.tools)  # described and called
        and not re.search(r"'word3word'|\\+[\"']word3word", text)  # Python code, or JSON in JSON
    )


def _shows_common_calls(text: str) -> bool:
    calls = list(calls_in(text))
    expected = [
        {"name": call["name"], "arguments": call["arguments"]}
        for message in PROBE.messages
        for call in message.get("tool_calls", ())
    ]
    return all(call in calls for call in expected)


def render_tools(
    conversation: Conversation, form: ToolForm, template: ToolTemplate
) -> tuple[str, str] | None:
    """Render a conversation with the tools in the form that a template accepts.

    If the template writes calls in the common form of replies and no call is required, the result
    is what the template makes of the given messages and tools. Otherwise, the system message, or
    the template's default system text, also says which tool to call and how.

    Where the template does not accept system messages or repeated roles, messages are merged and
    system messages become user messages, as in `adafuse_llm.text.chat.fit`. Where it does not
    accept schemas without a type or properties, they get both.

    Args:
        conversation: the conversation, with its tools.
        form: the form that `find_form` found for the template.
        template: function that renders messages and tools. It may raise any exception.

    Returns:
        The rendered conversation, and the rendering of a conversation of the same structure with
        other words. None if the template raises an error, or omits a message, a call or a result.
    """
    how = conversation.tools and not form.is_common
    system = [f"{HOW_TO_CALL}{ONLY_THIS_FORM}" if how else "", conversation.request]
    added = " ".join(filter(None, system))
    for tools in (_tools(conversation), _tools(conversation, complete=True)):
        default = ""
        if (added or conversation.instructions) and not conversation.has_system:
            default = default_system(_with_tools(template, tools))
        messages = conversation.with_system(added, default=default).messages
        for arranged in _arrangements(messages):
            marked, marks = _with_marks(arranged, form)
            words = _try(template, _messages(marked, form), tools)
            if words and all(mark in words for mark in marks):
                text = _try(template, _messages(arranged, form), tools)
                if text:
                    return text, words
    return None


def _with_tools(template: ToolTemplate, tools: list[dict[str, Any]]) -> Template:
    return lambda messages: template(messages, tools)


def _try(
    template: ToolTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> str:
    """Render messages and tools. Return no text if the template raises an error."""
    try:
        return template(messages, tools)
    except Exception:  # templates raise errors of any type
        return ""


def _arrangements(messages: Sequence[ChatMessage]) -> Iterator[Sequence[ChatMessage]]:
    """Return messages with fewer and fewer system messages and repeated roles."""
    yield messages
    for merged in (
        merge_turns(messages),
        fold_system(messages, but_first=True),
        fold_system(messages),
    ):
        yield cast("list[ChatMessage]", merged)


def _with_marks(
    messages: Sequence[ChatMessage], form: ToolForm
) -> tuple[list[ChatMessage], list[str]]:
    """Replace texts and arguments with unique words.

    Returns:
        The messages, and the words that a rendering must contain.
    """
    marked: list[ChatMessage] = []
    marks: list[str] = []
    for number, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        changed: ChatMessage = {**message}
        if "reasoning_content" in message:
            changed["reasoning_content"] = f"thought{number}thought"
        if message["content"].strip():
            changed["content"] = f"text{number}text"
            if not calls or form.text != "omitted":
                marks.append(changed["content"])
        if calls:
            changed["tool_calls"] = [
                {**call, "arguments": {f"key{number}x{index}key": f"value{number}x{index}value"}}
                if call["arguments"]
                else call
                for index, call in enumerate(calls)
            ]
            for call in changed["tool_calls"]:
                marks += [*call["arguments"], *call["arguments"].values()]
        marked.append(changed)
    return marked, marks


def _tools(conversation: Conversation, *, complete: bool = False) -> list[dict[str, Any]]:
    """Return tools in the form of OpenAI's API, which templates expect.

    Args:
        conversation: the conversation.
        complete: whether a schema gets a type and properties if it lacks them. A tool without a
            schema always gets both.
    """
    nothing = {"type": "object", "properties": {}}
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": {**nothing, **tool.parameters}
                if complete
                else tool.parameters or nothing,
            },
        }
        for tool in conversation.tools
    ]


def _messages(messages: Iterable[ChatMessage], form: ToolForm) -> list[dict[str, Any]]:
    """Return messages as a template with this form accepts them.

    Calls get ids of nine letters and digits, because some templates require them.
    """
    result: list[dict[str, Any]] = []
    called: dict[str, tuple[str, str]] = {}  # maps the calls' ids to the new ids and the names
    numbers = itertools.count(1)
    for message in messages:
        text = message["content"]
        if calls := message.get("tool_calls"):
            if text.strip() and form.text == "own message":
                result.append({"role": "assistant", "content": text})
            has_text = bool(text.strip()) and form.text == "same message"
            empty = None if form.has_no_content else ""
            content = text if has_text else empty
            converted = []
            for call in calls:
                called[call["id"]] = key, _ = f"call{next(numbers):05d}", call["name"]
                converted.append(_call(call, key, form))
            groups = [converted] if form.is_parallel else [[each] for each in converted]
            thought = _reasoning(message)
            for group in groups:
                result.append(
                    {"role": "assistant", "content": content, **thought, "tool_calls": group}
                )
                content, thought = empty, {}
        elif (given := message.get("tool_call_id")) is not None:
            key, name = called[given]
            at = len(result) if form.is_parallel else _end_of_results(result, key)
            result.insert(at, {"role": "tool", "tool_call_id": key, "name": name, "content": text})
        else:
            result.append({"role": message["role"], "content": text, **_reasoning(message)})
    return result


def _reasoning(message: ChatMessage) -> dict[str, str]:
    reasoning = message.get("reasoning_content")
    return {"reasoning_content": reasoning} if reasoning else {}


def _call(call: Call, key: str, form: ToolForm) -> dict[str, Any]:
    arguments = to_json(call["arguments"]) if form.has_json_text else call["arguments"]
    function = {"name": call["name"], "arguments": arguments}
    if form.is_nested:
        return {"id": key, "type": "function", "function": function}
    return {"id": key, **function}


def _end_of_results(messages: Sequence[dict[str, Any]], key: str) -> int:
    """Return the position after the message with a call and after the results that follow it.

    Return the end of `messages` if other messages came after the call and its neighbours.
    """
    for at in reversed(range(len(messages))):
        message = messages[at]
        if any(call["id"] == key for call in message.get("tool_calls", ())):
            return at + 1
        if message.get("tool_call_id") == key:
            return at + 1
        if "tool_calls" not in message and message["role"] != "tool":
            break
    return len(messages)
