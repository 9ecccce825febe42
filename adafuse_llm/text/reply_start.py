"""Where a reply begins, the same for all members: in reasoning, or at the answer.

Some chat templates open reasoning at the end of the prompt, some leave it to the member, and others
know no reasoning. But members share one text:

* If all members reason, and one template opens reasoning, it is open for all of them.
* If a member does not reason, or the form of the response permits no reasoning, reasoning is
  switched off in templates that have a variable for this, and closed where one still opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.text.conversation import Conversation, check_conversation
from adafuse_llm.text.reasoning import CLOSING, REASONING_CLOSES, REASONING_OPENS, open_reasoning
from adafuse_llm.text.templates import SWITCHES, ReplyStart

THOUGHTS = tuple(
    f"{start}x{REASONING_CLOSES}" for start in ("", REASONING_OPENS, f"{REASONING_OPENS}\n")
)
"""Beginnings of replies with reasoning. A form that permits none of them permits no reasoning."""

EFFORT = "reasoning_effort"
"""The variable of chat templates for how much a member reasons."""

QUESTION = check_conversation([{"role": "user", "content": "word"}])


@dataclass(frozen=True)
class _Beginning:
    name: str
    codec: TextCodec
    variables: Mapping[str, Any]
    prefix: str = ""  # the reasoning that the template opens
    reasons: bool = False  # whether the member reasons before it answers, or may do so

    @classmethod
    def of(
        cls, name: str, codec: TextCodec, conversation: Conversation, variables: Mapping[str, Any]
    ) -> _Beginning:
        prefix, reasons = "", False
        if codec.template_facts.knows_reasoning:
            # ignore this error, because encoding raises it again with the member's name
            with suppress(InvalidInputError):
                opening = codec.reply_opening(conversation, variables)
                prefix = open_reasoning(opening)
                is_closed = REASONING_CLOSES in opening
                reasons = bool(prefix) or not (is_closed or _is_off(codec, variables))
        return cls(name, codec, variables, prefix, reasons)

    def without_reasoning(self, conversation: Conversation) -> _Beginning:
        off = {name: False for name in _switches(self.codec) if name not in self.variables}
        if not off or not self.reasons:
            return self
        return self.of(self.name, self.codec, conversation, {**self.variables, **off})


def effort_variables(codecs: Mapping[str, TextCodec], effort: str) -> tuple[dict[str, Any], str]:
    """Return the variables that pass an effort of reasoning to chat templates.

    The effort ``none`` also switches reasoning off. The second value is the reason why the effort
    changes nothing, or "" if it changes something.
    """
    known = {name for codec in codecs.values() for name in codec.template_facts.variables}
    switches = [name for name in SWITCHES if name in known and effort == "none"]
    off: dict[str, Any] = dict.fromkeys(switches[:1], False)
    if EFFORT not in known:
        return off, "" if off else "no chat template of the members reads it"
    refusing = [name for name in codecs if not _accepts(codecs[name], {EFFORT: effort})]
    if not refusing:
        return {**off, EFFORT: effort}, ""
    names = ", ".join(map(repr, refusing))
    return off, "" if off else f"{short_repr(effort)} is refused by the template of {names}"


def _accepts(codec: TextCodec, variables: Mapping[str, Any]) -> bool:
    try:
        codec.reply_opening(QUESTION, variables)
    except InvalidInputError:
        return False
    return True


def _switches(codec: TextCodec) -> list[str]:
    return [name for name in SWITCHES if name in codec.template_facts.variables]


def _is_off(codec: TextCodec, variables: Mapping[str, Any]) -> bool:
    # whether the template has reasoning off until a variable switches it on
    def shown(**switch: bool) -> list[int]:
        return codec.encode_conversation(QUESTION, ReplyStart({**variables, **switch}))

    return any(
        shown(**{name: True}) != shown() == shown(**{name: False}) for name in _switches(codec)
    )


def start_replies(
    codecs: Mapping[str, TextCodec],
    conversation: Conversation,
    variables: Mapping[str, Any],
    permits: Callable[[str], bool] | None = None,
) -> tuple[dict[str, ReplyStart], str]:
    """Choose how the chat templates of the active members begin a reply.

    `permits` returns whether a response can begin with a text. None: it can begin with any.

    Returns:
        The beginnings by member, and the reasoning with which the templates began the reply, or "".
    """
    free = permits is None or any(map(permits, THOUGHTS))
    if conversation.continues:
        prefix = REASONING_OPENS if open_reasoning(conversation.begun) else ""
        if prefix and not free:
            raise InvalidInputError(
                f"the last message begins reasoning ({REASONING_OPENS}), but the form of the "
                f"response permits none. Close the reasoning with {REASONING_CLOSES}, or leave the "
                "form out."
            )
        return {name: ReplyStart(variables) for name in codecs}, prefix
    # unless all members reason, none does
    beginnings = _beginnings(codecs, conversation, variables)
    if not (free and all(each.reasons for each in beginnings)):
        beginnings = [each.without_reasoning(conversation) for each in beginnings]
    is_open = free and all(each.reasons for each in beginnings)
    prefix = next((each.prefix for each in beginnings if each.prefix), "") if is_open else ""
    # give all members the reasoning that one template opens, or close what a template still opens
    starts = {}
    for each in beginnings:
        added = "" if each.prefix else prefix
        if each.prefix and not is_open:
            added = CLOSING
        starts[each.name] = ReplyStart(each.variables, added)
    return starts, prefix


def mixed_reasoning(codecs: Mapping[str, TextCodec], variables: Mapping[str, Any]) -> str | None:
    """Return a warning if only some members reason and no variable prevents this; else None."""
    beginnings = _beginnings(codecs, QUESTION, variables)
    reasoning = [each.name for each in beginnings if each.without_reasoning(QUESTION).reasons]
    others = [name for name in codecs if name not in reasoning]
    if not reasoning or all(each.reasons for each in beginnings):
        return None
    return (
        f"only some members reason before they answer: {', '.join(map(repr, reasoning))}, but not "
        f"{', '.join(map(repr, others))}. All members write the same text. So reasoning that a "
        "chat template opens is closed before the response, and other reasoning is a part of it. "
        "Use members that all reason, or members that do not"
    )


def _beginnings(
    codecs: Mapping[str, TextCodec], conversation: Conversation, variables: Mapping[str, Any]
) -> list[_Beginning]:
    return [_Beginning.of(name, codec, conversation, variables) for name, codec in codecs.items()]
