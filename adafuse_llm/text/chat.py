"""Conversion of messages to a form that a member's chat template accepts.

A member without a chat template uses a plain format. The plain format begins with the system text.
One paragraph per turn follows. Each paragraph begins with the role. The text ends where the
assistant's reply begins::

    Answer briefly.

    User: Who founded the mill?

    Assistant:
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from adafuse_llm.errors import InvalidInputError, nearest, short_repr
from adafuse_llm.text.words import check_text

ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {"developer": "system", "human": "user", "ai": "assistant"}


Template = Callable[[list[dict[str, Any]]], str]
"""A function that renders messages up to the start of the assistant's reply."""


class Message(TypedDict):
    """One turn of a conversation: `role` is one of `ROLES`, and `content` is text."""

    role: str
    content: str


@dataclass(frozen=True)
class Tool:
    """A tool that members can call.

    Attributes:
        name: name by which a call selects the tool.
        description: text that describes what the tool does.
        parameters: a JSON schema of the arguments.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with roles in `ROLES` and plain text. Content of None becomes empty text.

    Raises:
        InvalidInputError: the list is empty, or a message has an invalid form, role or content.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InvalidInputError(
            "messages must be a list of {'role': ..., 'content': ...} dicts; "
            f"got {type(messages).__name__}"
        )
    checked = [check_message(number, message) for number, message in enumerate(messages)]
    check_any_text(checked)
    return checked


def check_any_text(messages: Sequence[Message], *, has_more: bool = False) -> None:
    """Check that members have something to read.

    Args:
        messages: checked messages.
        has_more: whether members read more than the content of the messages, such as tools.

    Raises:
        InvalidInputError: there is no message, or nothing to read.
    """
    if not messages:
        raise InvalidInputError("the list of messages is empty: pass at least one user message")
    if not has_more and not any(message["content"].strip() for message in messages):
        raise InvalidInputError(
            "messages have no text: pass a text, or at least one message with content"
        )


def check_message(number: int, message: Any, *, also: Sequence[str] = ()) -> Message:
    """Return the role and the content of a message.

    Args:
        number: index of the message, for errors.
        message: a dict.
        also: keys that the message may have in addition to role and content.

    Raises:
        InvalidInputError: the message has an invalid form, role or content.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidInputError(
            f"message {number} must be a dict with 'role' and 'content'; got {message!r:.80}"
        )
    role = check_role(message["role"], f"message {number}")
    keys = ("role", "content", *also)
    unknown = [key for key in message if key not in keys]
    if any(message[key] is not None for key in unknown):
        allowed = f"{', '.join(map(repr, keys[:-1]))} and {keys[-1]!r}"
        raise InvalidInputError(
            f"message {number} has {', '.join(repr(str(key)) for key in unknown)}; only {allowed} "
            "are allowed. Put all text for the models into 'content'."
        )
    return {"role": role, "content": check_content(message.get("content"), f"message {number}")}


def check_role(role: Any, what: str) -> str:
    """Return the role in `ROLES` that a role or an alias stands for.

    Args:
        role: one of `ROLES`, or another framework's name for one of them.
        what: name of the message in error messages, such as ``"message 0"``.

    Raises:
        InvalidInputError: the role is unknown.
    """
    known = _ALIASES.get(role, role) if isinstance(role, str) else role
    if not isinstance(known, str) or known not in ROLES:
        raise InvalidInputError(
            f"{what} has role {short_repr(known)}; allowed: {', '.join(ROLES)}."
            f"{nearest(str(known), ROLES)}"
        )
    return known


def check_content(content: Any, what: str) -> str:
    """Return the content of a message as text.

    Args:
        content: text, a list of text parts, or None for no text.
        what: name of the message in error messages, such as ``"message 0"``.

    Raises:
        InvalidInputError: the content has another type, or is not valid Unicode.
    """
    if content is None:
        content = ""
    if isinstance(content, (list, tuple)):
        content = "".join(_part_text(part, what) for part in content)
    if not isinstance(content, str):
        raise InvalidInputError(
            f"{what} has content of type {type(content).__name__}; only text is allowed"
        )
    check_text(content, what)
    return content


def _part_text(part: Any, what: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidInputError(f"{what} has a content part that is not text; only text is allowed")


def merge_turns(messages: Iterable[Message]) -> list[Message]:
    """Merge consecutive messages with the same role; a blank line separates their texts.

    Messages with tool calls, results of calls, and messages with reasoning do not change.
    """
    merged: list[Message] = []
    for message in messages:
        if (
            merged
            and merged[-1]["role"] == message["role"]
            and _is_plain(merged[-1])
            and _is_plain(message)
        ):
            merged[-1] = {
                "role": message["role"],
                "content": f"{merged[-1]['content']}\n\n{message['content']}",
            }
        else:
            merged.append(message)
    return merged


def _is_plain(message: Message) -> bool:
    return message.keys() <= {"role", "content"}


def fold_system(messages: Iterable[Message], *, but_first: bool = False) -> list[Message]:
    """Turn system messages and tool results into user messages, and merge consecutive messages.

    Some templates do not support these roles, or require strictly alternating turns. The returned
    conversation begins with a user message, or with the system message that `but_first` keeps.
    Messages with tool calls, results of calls, and messages with reasoning do not change.

    Args:
        messages: checked messages.
        but_first: whether to leave a system message at the beginning unchanged.
    """
    turns = merge_turns(messages)
    kept = turns[:1] if but_first and turns[0]["role"] == "system" else []
    turns = [
        {"role": "user", "content": turn["content"]}
        if turn["role"] in ("system", "tool") and _is_plain(turn)
        else turn
        for turn in turns[len(kept) :]
    ]
    if not turns or turns[0]["role"] != "user":
        turns.insert(0, {"role": "user", "content": ""})
    return [*kept, *merge_turns(turns)]


def render_plain(messages: Iterable[Message], *, continues: bool = False) -> str:
    """Render messages in the plain format for members without a chat template.

    Args:
        messages: checked messages.
        continues: whether the reply continues the last message.
    """
    parts = [
        message["content"]
        if message["role"] == "system"
        else f"{message['role'].capitalize()}: {message['content']}"
        for message in messages
    ]
    return "\n\n".join(parts if continues else [*parts, "Assistant:"])


def as_plain_text(messages: Sequence[Message], *, continues: bool = False) -> str:
    """Return the text of a single message. Return several messages in the plain format."""
    if len(messages) == 1:
        return messages[0]["content"]
    return render_plain(messages, continues=continues)


def fit(messages: Sequence[Message], template: Template) -> list[dict[str, Any]]:
    """Convert messages to a form that a template accepts, with as few changes as possible.

    These forms are tried in order:

    1. The messages do not change.
    2. Consecutive messages of the same role are merged.
    3. System messages and tool results become user messages, but a system message at the beginning
       does not change.
    4. All system messages and tool results become user messages.
    5. The same four forms are tried with content as a list of parts.

    The result is the first form from which the template omits no message. If the template omits
    messages from every form, the result is the form with the fewest omitted messages.

    Args:
        messages: checked messages.
        template: function that renders messages. If it does not accept a form, it may raise any
            exception.

    Raises:
        InvalidInputError: the template accepts none of the forms, or omits all messages.
    """
    first_error: Exception | None = None
    best: list[dict[str, Any]] = []
    fewest = len(messages)
    forms = (
        messages,
        merge_turns(messages),
        fold_system(messages, but_first=True),
        fold_system(messages),
    )
    for convert, form in itertools.product((_as_text, _as_parts), forms):
        try:
            template(convert(form))
            marked = _with_marks(form)
            text = template(convert(marked))
        except Exception as error:  # templates raise errors of any type
            first_error = first_error or error
            continue
        marks = [message["content"] for message in marked if message["content"]]
        omitted = sum(mark not in text for mark in marks)
        if omitted < min(fewest, len(marks)):
            best, fewest = convert(form), omitted
        if not omitted:
            break
    if best:
        return best
    reason = (
        f"{type(first_error).__name__}: {first_error}" if first_error else "it omits every message"
    )
    raise InvalidInputError(
        f"the chat template does not accept these messages in any form ({reason}). Roles given: "
        f"{', '.join(message['role'] for message in messages)}."
    ) from first_error


def default_system(template: Template) -> str:
    """Return the system text that a template writes if a conversation has no system message.

    The text is found by rendering: it stands where the template writes a given system message. It
    is empty if the template writes none, or does not accept system messages.

    Args:
        template: function that renders messages. It may raise any exception.
    """
    mark = "word0word"
    user = {"role": "user", "content": "word1word"}
    try:
        bare = template([user])
        before, _, after = template([{"role": "system", "content": mark}, user]).partition(mark)
        if not bare.startswith(before) or not bare.endswith(after):
            return ""
        text = bare[len(before) : len(bare) - len(after)]
        given = template([{"role": "system", "content": text}, user])
    except Exception:  # templates raise errors of any type
        return ""
    return text if given == bare else ""


def _as_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def _as_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with content as a list of parts, which some multimodal models require."""
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def _with_marks(messages: Sequence[Message]) -> list[Message]:
    """Replace each text with a unique word, to detect which messages a template omits.

    This does not detect a template that omits only parts of texts. Some templates do so on purpose,
    for example with earlier reasoning.
    """
    return [
        {**m, "content": f"word{number}word" if m["content"].strip() else ""}
        for number, m in enumerate(messages)
    ]
