"""Messages to prompt tokens, with each member's own chat template.

A member without a template gets a plain fallback: system text first, then one paragraph per
turn, named, ending where the assistant is to write::

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
"""Renders messages, up to where the assistant is to write."""


class Message(TypedDict):
    """One turn of a conversation: `role` is one of `ROLES`, `content` its text."""

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
    """Messages with known roles and plain text; None content becomes empty.

    Raises:
        InvalidInputError: there is no message, or one has another shape, role or content.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InvalidInputError(
            "messages must be a list of {'role': ..., 'content': ...}; "
            f"got {type(messages).__name__}"
        )
    checked = [_check_message(number, message) for number, message in enumerate(messages)]
    if not checked:
        raise InvalidInputError("messages are empty: pass at least one user message")
    if not any(message["content"].strip() for message in checked):
        raise InvalidInputError("messages hold no text: pass at least one with content")
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
            "Put what the models are to read into the content."
        )
    return {"role": role, "content": check_content(message.get("content"), f"message {number}")}


def check_role(role: Any, what: str) -> str:
    """The role that `role` stands for.

    Args:
        role: one of `ROLES`, or another framework's word for one.
        what: name of the message in errors.

    Raises:
        InvalidInputError: it is none.
    """
    known = _ALIASES.get(role, role) if isinstance(role, str) else role
    if not isinstance(known, str) or known not in ROLES:
        raise InvalidInputError(
            f"{what} has role {known!r}; allowed: {', '.join(ROLES)}.{nearest(str(known), ROLES)}"
        )
    return known


def check_content(content: Any, what: str) -> str:
    """The text of a message's content: text, a list of text parts, or None for no text.

    Args:
        content: the content.
        what: name of the message in errors.

    Raises:
        InvalidInputError: it is something else, or not valid Unicode.
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
    raise InvalidInputError(
        f"{what} holds a content part that is not text; local text models take text only"
    )


def merge_turns(messages: Iterable[Message]) -> list[Message]:
    """Consecutive messages of one role become one, joined by a blank line."""
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
    """System messages and results of tools become part of the user's words; a conversation begins
    with the user. For templates that know no such roles or need strictly alternating turns.

    Args:
        messages: checked messages.
        but_first: leave the system message that the conversation begins with as it is.
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
    """The documented fallback for members without a chat template."""
    parts = [
        message["content"]
        if message["role"] == "system"
        else f"{message['role'].capitalize()}: {message['content']}"
        for message in messages
    ]
    return "\n\n".join([*parts, "Assistant:"])


def as_plain_text(messages: Sequence[Message]) -> str:
    """What is asked, without any template: the only message's text, else all turns by name."""
    if len(messages) == 1:
        return messages[0]["content"]
    return render_plain(messages)


def fit(messages: Sequence[Message], template: Template) -> list[dict[str, Any]]:
    """The messages in a form that a template takes, as close to what they are as it allows.

    Tried in turn: the messages as they are; consecutive turns of one role merged; later system
    messages and results of tools folded into the user's turns, then the first system message, too;
    the same with content as a list of parts. The first form of which the template leaves no message
    out is used, else the one of which it leaves out the fewest.

    Args:
        messages: checked messages.
        template: renders messages; raises what it cannot take.

    Raises:
        InvalidInputError: the template takes none of the forms, or nothing of any.
    """
    refusal: Exception | None = None
    best: list[dict[str, Any]] = []
    fewest = len(messages)
    forms = (
        messages,
        merge_turns(messages),
        fold_system(messages, but_first=True),
        fold_system(messages),
    )
    for shaped, form in itertools.product((_as_text, _as_parts), forms):
        try:
            template(shaped(form))
            marked = _marked(form)
            text = template(shaped(marked))
        except Exception as error:  # templates raise whatever they like
            refusal = refusal or error
            continue
        words = [message["content"] for message in marked if message["content"]]
        left_out = sum(word not in text for word in words)
        if left_out < min(fewest, len(words)):
            best, fewest = shaped(form), left_out
        if not left_out:
            break
    if best:
        return best
    reason = f"{type(refusal).__name__}: {refusal}" if refusal else "it leaves all of them out"
    raise InvalidInputError(
        f"the chat template takes these messages in no form ({reason}). Roles given: "
        f"{', '.join(message['role'] for message in messages)}."
    ) from refusal


def _as_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def _as_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """For templates of models that take more than text, some of which take nothing else."""
    return [
        {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages
    ]


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages with a word of its own in place of each text, to tell which of them a template
    leaves out. Parts of texts do not count: some templates leave out, say, earlier reasoning on
    purpose.
    """
    return [
        {"role": m["role"], "content": f"word{number}word" if m["content"].strip() else ""}
        for number, m in enumerate(messages)
    ]
