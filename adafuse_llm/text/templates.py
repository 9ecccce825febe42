"""Chat templates: their variables, and how conversations are rendered with them.

A template is a program in Jinja. Besides the messages, it may read variables such as
``enable_thinking``. `AdaFuseConfig.chat_template_kwargs` sets them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest, short_repr
from adafuse_llm.text.conversation import (
    CALL_OPENS,
    HOW_TO_CALL,
    ONLY_THIS_FORM,
    Conversation,
    Message,
    to_json,
)
from adafuse_llm.text.reasoning import REASONING_CLOSES

OPTION = "chat_template_kwargs"

SWITCHES = ("enable_thinking", "thinking")
"""Names of variables that switch reasoning on and off."""

_PROVIDED = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Names that transformers sets in every template."""

_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")  # a block of transformers only

_WORD = "word0word"  # no template writes it itself

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Messages], str]
"""A function that renders messages and tools up to the start of the assistant's reply."""


@dataclass(frozen=True)
class TemplateFacts:
    """What can be known of a chat template without rendering it.

    Attributes:
        variables: the variables that a user can set.
        knows_reasoning: whether it contains the marker that closes reasoning.
        reads_tools: whether it reads tools and their calls.
        reads_calls: whether it reads earlier calls if the conversation has no tools.
        has_common_calls: whether it writes calls in the form of `adafuse_llm.text.conversation`.
    """

    variables: frozenset[str] = frozenset()
    knows_reasoning: bool = False
    reads_tools: bool = False
    reads_calls: bool = False
    has_common_calls: bool = False

    @classmethod
    def of(cls, template: Any, provided: Iterable[str] = ()) -> TemplateFacts:
        """Return the facts of a template, or of several by name, without `provided` variables."""
        texts = template if isinstance(template, Mapping) else {"default": template or ""}
        sources = list(map(str, texts.values()))
        with_tools = str(texts.get("tool_use", texts.get("default", "")))
        variables = frozenset().union(*map(_variables, sources))
        return cls(
            variables - _PROVIDED - {*provided},
            knows_reasoning=any(REASONING_CLOSES in source for source in sources),
            reads_tools=_reads_calls(with_tools),
            reads_calls=_reads_calls(str(texts.get("default", ""))),
            has_common_calls=CALL_OPENS in with_tools
            and '"arguments":' in with_tools.replace("\\", ""),
        )


def _variables(template: str) -> frozenset[str]:
    import jinja2
    from jinja2.meta import find_undeclared_variables

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except (jinja2.TemplateSyntaxError, RecursionError):  # rendering raises the same error
        return frozenset()
    return frozenset(find_undeclared_variables(parsed))


def _reads_calls(template: str) -> bool:
    return "tool_calls" in template and "tools" in _variables(template)


@dataclass(frozen=True)
class ReplyStart:
    """Variables for a member's chat template, and text that is `added` after the rendered text."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    added: str = ""


def render_conversation(conversation: Conversation, facts: TemplateFacts, render: Render) -> str:
    """Render a conversation with a chat template. `render` may raise any exception.

    A template that reads tools writes tools, calls and results in its own form. For others, they
    become text (`Conversation.flat`).

    Raises:
        InvalidInputError: the template does not accept the messages.
    """
    reads_tools = facts.reads_tools if conversation.tools else facts.reads_calls
    if conversation.has_tools and reads_tools:
        with suppress(InvalidInputError):
            return _render_tools(conversation, facts, render)
    # let the member read tools, calls and results as text
    messages: Messages = conversation.flat()
    # some templates write a system message only in the turn of a user, which may be missing
    if {each["role"] for each in messages} == {"system"}:
        with suppress(Exception):
            if _WORD not in render([{"role": "system", "content": _WORD}], ()):
                messages = _alternating(messages)
    return _render(messages, (), render)


def _render_tools(conversation: Conversation, facts: TemplateFacts, render: Render) -> str:
    none: dict[str, Any] = {"type": "object", "properties": {}}
    functions = [
        {**vars(tool), "parameters": tool.parameters or none} for tool in conversation.tools
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    # the system message explains how to call tools, unless the template does
    explains = conversation.tools and not facts.has_common_calls
    how = f"{HOW_TO_CALL}{ONLY_THIS_FORM}" if explains else ""
    added = " ".join(filter(None, [how, conversation.request]))
    messages = conversation.with_system(added).messages
    # without the explanation, which a template may drop, the member would not know the form
    needed = ONLY_THIS_FORM if explains else ""
    # arguments are a dict in most templates, and text in a few
    with suppress(InvalidInputError):
        return _render(_with_calls(messages), tools, render, needed)
    return _render(_with_calls(messages, as_text=True), tools, render, needed)


def _render(messages: Messages, tools: Messages, render: Render, needed: str = "") -> str:
    # if the template refuses the messages, or drops the text `needed`, try alternating turns
    reason: Exception | None = None
    for form in (messages, _alternating(messages, keeps_first=True), _alternating(messages)):
        try:
            text = render(form, tools)
        except Exception as error:  # templates raise errors of any type
            reason = reason or error
        else:
            if needed in text:
                return text
    raise InvalidInputError(
        f"the chat template does not accept these messages ({type(reason).__name__}: {reason}). "
        f"Roles given: {', '.join(message['role'] for message in messages)}."
    ) from reason


def _alternating(messages: Messages, *, keeps_first: bool = False) -> list[Mapping[str, Any]]:
    # System messages and plain tool results become user messages, and consecutive messages of a
    # role become one. Calls and their results stay, and so does a first system message if
    # `keeps_first` is true.
    result: list[Mapping[str, Any]] = []
    for message in messages:
        role, is_plain = message["role"], not message.keys() & {"tool_calls", "tool_call_id"}
        if not (keeps_first and not result and role == "system"):
            role = "user" if is_plain and role in ("system", "tool") else role
            if role != "user" and _is_start(result):
                result.append({"role": "user", "content": ""})
        last = result[-1] if result else {}
        if is_plain and last.get("role") == role and "tool_calls" not in last:
            result[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            result.append({**message, "role": role})
    return [*result, {"role": "user", "content": ""}] if _is_start(result) else result


def _is_start(messages: Messages) -> bool:
    return not messages or messages[-1]["role"] == "system"


def _with_calls(messages: Sequence[Message], *, as_text: bool = False) -> list[dict[str, Any]]:
    # write calls as OpenAI's API does: templates expect it, and some require ids of nine characters
    result: list[dict[str, Any]] = []
    numbers = itertools.count(1)
    called: dict[str, dict[str, str]] = {}  # maps the calls' ids to the new ids and the names
    for message in messages:
        converted: dict[str, Any] = {**message}
        if "tool_calls" in message:
            converted["tool_calls"] = []
        for call in message.get("tool_calls", ()):
            key = f"call{next(numbers):05d}"
            called[call["id"]] = {"tool_call_id": key, "name": call["name"]}
            arguments = to_json(call["arguments"]) if as_text else call["arguments"]
            function = {"name": call["name"], "arguments": arguments}
            converted["tool_calls"].append({"id": key, "type": "function", "function": function})
        if "tool_call_id" in message:
            converted |= called[message["tool_call_id"]]
        result.append(converted)
    return result


def check_variables(variables: Mapping[str, Any], facts: Mapping[str, TemplateFacts]) -> None:
    """Check variables for chat templates. `facts` are those of the templates, by member.

    Raises:
        InvalidOptionError: no template reads a variable, or the value of a switch is no boolean.
    """
    read = sorted({name for each in facts.values() for name in each.variables})
    for name, value in variables.items():
        if name not in read:
            whose = "the members" if len(facts) > 1 else "member"
            raise InvalidOptionError(
                f"option {OPTION!r}: no chat template of {whose} {', '.join(map(repr, facts))} "
                f"reads {short_repr(name)}.{nearest(name, read)} Variables that can be set: "
                f"{', '.join(read) or 'none'}."
            )
        if name in SWITCHES and not isinstance(value, bool):
            raise InvalidOptionError(
                f"option {OPTION!r}: {name!r} must be true or false; got {short_repr(value)}"
            )
