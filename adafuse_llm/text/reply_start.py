"""Where a reply begins, the same for all members: in reasoning, or at the answer.

Members share one text, so they must begin it at the same place. Some chat templates open reasoning
at the end of the prompt, some leave it to the member, and others know no reasoning:

* If all members reason, reasoning is opened for all of them if a template opens it for one.
* Otherwise, and if the required form of the response permits no reasoning, it is switched off in
  the templates that have a variable for this, and closed where it is still open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adafuse_llm.errors import InvalidInputError
from adafuse_llm.reasoning import CLOSING, REASONING_CLOSES, REASONING_OPENS, open_reasoning
from adafuse_llm.text.codec import RendersTemplates, TextCodec
from adafuse_llm.text.conversation import Conversation, check_conversation
from adafuse_llm.text.templates import SWITCHES, ReplyStart, TemplateFacts, member_variables

THOUGHTS = tuple(
    f"{start}x{REASONING_CLOSES}" for start in ("", REASONING_OPENS, f"{REASONING_OPENS}\n")
)
"""Beginnings of replies with reasoning."""

QUESTION = check_conversation([{"role": "user", "content": "word"}])


@dataclass(frozen=True)
class _Beginning:
    """How a template begins a reply.

    Attributes:
        name: the member's name.
        codec: the member's codec; None if its template knows no reasoning.
        variables: variables for the template.
        prefix: the reasoning that the template opens; empty if it opens none.
        reasons: whether the member reasons before it answers, or may do so.
    """

    name: str
    codec: RendersTemplates | None
    variables: Mapping[str, Any]
    prefix: str = ""
    reasons: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        codec: TextCodec,
        conversation: Conversation,
        variables: Mapping[str, Any],
    ) -> _Beginning:
        """Return how a member's template begins the reply to a conversation."""
        if not isinstance(codec, RendersTemplates) or not codec.template_facts.knows_reasoning:
            return cls(name, None, variables)
        try:
            opening = codec.reply_opening(conversation, variables)
            prefix = open_reasoning(opening)
            closed = not prefix and REASONING_CLOSES in opening
            reasons = bool(prefix) or not (closed or _is_off(codec, variables))
        except Exception:  # encoding the conversation raises the same error, with the name
            return cls(name, codec, variables)
        return cls(name, codec, variables, prefix, reasons)

    def without_reasoning(self, conversation: Conversation) -> _Beginning:
        """Return the beginning with reasoning switched off, if the template can do so."""
        switches = [] if self.codec is None else _switches(self.codec)
        off = {name: False for name in switches if name not in self.variables}
        if self.codec is None or not off or not self.reasons:
            return self
        return self.of(self.name, self.codec, conversation, {**self.variables, **off})


def _switches(codec: RendersTemplates) -> list[str]:
    known = codec.template_facts.variables
    return [name for name in SWITCHES if known is not None and name in known]


def _is_off(codec: RendersTemplates, variables: Mapping[str, Any]) -> bool:
    """Return whether reasoning is off unless a variable of the template switches it on."""

    def shown(**switch: bool) -> list[int]:
        return codec.encode_conversation(QUESTION, ReplyStart({**variables, **switch}))

    return any(
        shown(**{name: True}) != shown() == shown(**{name: False}) for name in _switches(codec)
    )


def template_facts(codec: TextCodec) -> TemplateFacts:
    """Return what is known of a member's chat template."""
    return codec.template_facts if isinstance(codec, RendersTemplates) else TemplateFacts()


def start_replies(
    codecs: Mapping[str, TextCodec],
    conversation: Conversation,
    given: Mapping[str, Any] | None,
    members: Sequence[str],
    permits: Callable[[str], bool] | None = None,
) -> tuple[dict[str, ReplyStart], str]:
    """Choose how the members' chat templates begin a reply.

    Args:
        codecs: the codecs of the active members, by name.
        conversation: the conversation.
        given: the option ``chat_template_kwargs``.
        members: names of all members of the ensemble.
        permits: function that tells whether a response can begin with a text. None if it may have
            any form.

    Returns:
        The beginnings by member, and the text with which the templates began the reply: an opening
        marker of reasoning and what follows it, or "".

    Raises:
        InvalidOptionError: `given` has invalid variables.
        InvalidInputError: the conversation begins reasoning that the response cannot continue.
    """
    variables = check_variables(codecs, given, members)
    if conversation.continues:
        prefix = REASONING_OPENS if open_reasoning(conversation.begun) else ""
        if prefix and permits is not None and not any(map(permits, THOUGHTS)):
            raise InvalidInputError(
                f"the last message begins reasoning ({REASONING_OPENS}), but the form of the "
                f"response permits none. Close the reasoning with {REASONING_CLOSES}, or leave the "
                "form out."
            )
        return {name: ReplyStart(values) for name, values in variables.items()}, prefix
    beginnings = _beginnings(codecs, conversation, variables)
    free = permits is None or any(map(permits, THOUGHTS))
    if not (free and _all_reason(beginnings)):
        beginnings = [each.without_reasoning(conversation) for each in beginnings]
    is_open = free and _all_reason(beginnings)
    prefix = next((each.prefix for each in beginnings if each.prefix), "") if is_open else ""
    starts = {}
    for each in beginnings:
        added = "" if each.prefix else prefix
        if each.prefix and not is_open:
            added = CLOSING
        starts[each.name] = ReplyStart(each.variables, added)
    return starts, prefix


def check_variables(
    codecs: Mapping[str, TextCodec], given: Mapping[str, Any] | None, members: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the variables for the template of every active member, by its name.

    Args:
        codecs: the codecs of the active members, by name.
        given: the option ``chat_template_kwargs``.
        members: names of all members of the ensemble.

    Raises:
        InvalidOptionError: `given` has invalid variables.
    """
    facts = {name: template_facts(codec) for name, codec in codecs.items()}
    return member_variables(given, facts, members)


def mixed_reasoning(
    codecs: Mapping[str, TextCodec], given: Mapping[str, Any] | None, members: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the members that reason before they answer, and those that do not.

    Args:
        codecs: the codecs of the active members, by name.
        given: the option ``chat_template_kwargs``.
        members: names of all members of the ensemble.

    Returns:
        The names. Both lists are empty if all members reason, or if reasoning can be switched off
        for those that do.

    Raises:
        InvalidOptionError: `given` has invalid variables.
    """
    beginnings = _beginnings(codecs, QUESTION, check_variables(codecs, given, members))
    if _all_reason(beginnings):
        return [], []
    reasoning = [each.name for each in beginnings if each.without_reasoning(QUESTION).reasons]
    others = [name for name in codecs if name not in reasoning]
    return (reasoning, others) if reasoning else ([], [])


def _beginnings(
    codecs: Mapping[str, TextCodec],
    conversation: Conversation,
    variables: Mapping[str, Mapping[str, Any]],
) -> list[_Beginning]:
    return [
        _Beginning.of(name, codec, conversation, variables[name]) for name, codec in codecs.items()
    ]


def _all_reason(beginnings: Sequence[_Beginning]) -> bool:
    return all(each.reasons for each in beginnings)
