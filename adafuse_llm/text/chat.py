"""Conversion of messages to a form that a member's chat template accepts.

A member without a template uses a plain format. It has the system text first, then one paragraph
per turn that begins with the role, and ends where the assistant's reply begins::

    Answer briefly.

    User: Who founded the mill?

    Assistant:
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from adafuse_llm.errors import InvalidInputError, nearest
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
        name: what a call names.
        description: what the tool does, in words.
        parameters: a JSON schema of the arguments.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with the roles in `ROLES` and plain text; content of None becomes empty.

    Raises:
        InvalidInputError: the list is empty, or a message has an invalid form, role or content.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InvalidInputError(
            "messages must be a list of {'role': ..., 'content': ...} dicts; "
            f"got {type(messages).__name__}"
        )
    checked = [_check_message(number, message) for number, message in enumerate(messages)]
    if not checked:
        raise InvalidInputError("messages are empty: pass at least one user message")
    if not any(message["content"].strip() for message in checked):
        raise InvalidInputError("messages have no text: pass at least one message with content")
    return checked


def _check_message(number: int, message: Any) -> Message:
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidInputError(
            f"message {number} must be a dict with 'role' and 'content'; got {message!r:.80}"
        )
    role = check_role(message["role"], f"message {number}")
    unknown = [str(key) for key in message if key not in ("role", "content")]
    if any(message[key] is not None for key in unknown):
        raise InvalidInputError(
            f"message {number} has {', '.join(map(repr, unknown))}; allowed: 'role' and 'content'. "
            "Put all text for the models into 'content'."
        )
    return {"role": role, "content": check_content(message.get("content"), f"message {number}")}


def check_role(role: Any, what: str) -> str:
    """Return the role in `ROLES` that a role or an alias stands for.

    Args:
        role: one of `ROLES`, or another framework's name for one.
        what: a name for the message in errors.

    Raises:
        InvalidInputError: the role is unknown.
    """
    known = _ALIASES.get(role, role) if isinstance(role, str) else role
    if not isinstance(known, str) or known not in ROLES:
        raise InvalidInputError(
            f"{what} has role {known!r}; allowed: {', '.join(ROLES)}.{nearest(str(known), ROLES)}"
        )
    return known


def check_content(content: Any, what: str) -> str:
    """Return the content of a message as text.

    Args:
        content: text, a list of text parts, or None for no text.
        what: a name for the message in errors.

    Raises:
        InvalidInputError: the content is something else, or not valid Unicode.
    """
    if content is None:
        content = ""
    if isinstance(content, (list, tuple)):
        content = "".join(_part_text(part, what) for part in content)
    if not isinstance(content, str):
        raise InvalidInputError(
            f"{what} has content of type {type(content).__name__}; allowed: text"
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
    """Merge consecutive messages with the same role; a blank line separates their texts."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1] = {
                "role": message["role"],
                "content": f"{merged[-1]['content']}\n\n{message['content']}",
            }
        else:
            merged.append(message)
    return merged


def fold_system(messages: Iterable[Message], *, but_first: bool = False) -> list[Message]:
    """Turn system messages and tool results into user messages, and merge consecutive ones.

    This is for templates that do not support these roles, or that require strictly alternating
    turns. The returned conversation begins with a user message.

    Args:
        messages: checked messages.
        but_first: whether to keep a system message at the beginning as it is.
    """
    turns = merge_turns(messages)
    kept = turns[:1] if but_first and turns[0]["role"] == "system" else []
    turns = [
        {"role": "user", "content": turn["content"]} if turn["role"] in ("system", "tool") else turn
        for turn in turns[len(kept) :]
    ]
    if not turns or turns[0]["role"] != "user":
        turns.insert(0, {"role": "user", "content": ""})
    return [*kept, *merge_turns(turns)]


def render_plain(messages: Iterable[Message]) -> str:
    """Render messages in the plain format for members without a chat template."""
    parts = [
        message["content"]
        if message["role"] == "system"
        else f"{message['role'].capitalize()}: {message['content']}"
        for message in messages
    ]
    return "\n\n".join([*parts, "Assistant:"])


def as_plain_text(messages: Sequence[Message]) -> str:
    """Return the text of a single message, or several messages in the plain format."""
    if len(messages) == 1:
        return messages[0]["content"]
    return render_plain(messages)


def fit(messages: Sequence[Message], template: Template) -> list[dict[str, Any]]:
    """Change messages as little as necessary to a form that a template accepts.

    These forms are tried in order:

    1. the messages without changes,
    2. with consecutive messages of the same role merged,
    3. with system messages, except a first one, and tool results folded into the user's turns,
    4. with the first system message folded, too,
    5. the same four forms with content as a list of parts.

    The result is the first form from which the template omits no message. If the template omits
    messages from every form, the result is the form with the fewest omitted messages.

    Args:
        messages: checked messages.
        template: renders messages; it may raise any exception for a form that it does not accept.

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
    reason = f"{type(first_error).__name__}: {first_error}" if first_error else "it omits them all"
    raise InvalidInputError(
        f"the chat template does not accept these messages in any form ({reason}). Roles given: "
        f"{', '.join(message['role'] for message in messages)}."
    ) from first_error


def _as_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def _as_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return content as lists of parts, as some templates of multimodal models require."""
    return [
        {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages
    ]


def _with_marks(messages: Sequence[Message]) -> list[Message]:
    """Replace each text with a unique word, to detect which messages a template omits.

    This does not detect omitted parts of texts. Some templates omit parts on purpose, such as
    earlier reasoning.
    """
    return [
        {"role": m["role"], "content": f"word{number}word" if m["content"].strip() else ""}
        for number, m in enumerate(messages)
    ]
