"""What can be known of a chat template without rendering it, and the variables that users set.

A template is a program in Jinja. Besides the messages, it may read variables such as
``enable_thinking``. `AdaFuseConfig.chat_template_kwargs` sets them, for all members or for one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adafuse_llm.errors import InvalidOptionError, nearest, short_repr
from adafuse_llm.reasoning import REASONING_CLOSES
from adafuse_llm.text.template_variables import free_variables
from adafuse_llm.text.words import check_text

OPTION = "chat_template_kwargs"

SWITCHES = ("enable_thinking", "thinking")
"""Names of variables that switch reasoning on and off."""

SET_OTHERWISE = {
    "messages": "pass messages=[...]",
    "conversation": "pass messages=[...]",
    "tools": "pass tools=[...]",
    "continue_final_message": "set the option continue_final_message",
}
"""Names that cannot be variables, with the right way to set them."""

RESERVED = frozenset(
    {
        *SET_OTHERWISE,
        "add_generation_prompt",
        "chat_template",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
    }
)
"""Names that cannot be variables. Most are arguments of ``apply_chat_template``."""


@dataclass(frozen=True)
class TemplateFacts:
    """What can be known of a chat template without rendering it.

    Attributes:
        variables: the variables that a user can set. None if the template cannot be parsed, so that
            it may read any variable.
        knows_reasoning: whether the template mentions the marker that closes reasoning.
        reads_reasoning: whether the template reads the reasoning of earlier messages.
    """

    variables: frozenset[str] | None = frozenset()
    knows_reasoning: bool = False
    reads_reasoning: bool = False

    @classmethod
    def of(cls, template: Any, provided: Iterable[str] = ()) -> TemplateFacts:
        """Return the facts of a template.

        Args:
            template: a template, several templates by name, or None.
            provided: variables that the tokenizer sets, such as ``bos_token``.
        """
        texts = template.values() if isinstance(template, Mapping) else [template or ""]
        sources = [str(text) for text in texts]
        found = [free_variables(source) for source in sources]
        variables: frozenset[str] | None = None
        if None not in found:
            variables = frozenset().union(*filter(None, found)) - RESERVED - {*provided}
        return cls(
            variables,
            knows_reasoning=any(REASONING_CLOSES in source for source in sources),
            reads_reasoning=any("reasoning_content" in source for source in sources),
        )

    def reads(self, variable: str) -> bool:
        """Return whether the template reads a variable, or may read it."""
        return self.variables is None or variable in self.variables


@dataclass(frozen=True)
class ReplyStart:
    """How a member's chat template begins a reply.

    Attributes:
        variables: variables for the template.
        added: text that follows the text of the template, before the reply.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    added: str = ""


def member_variables(
    given: Mapping[str, Any] | None, facts: Mapping[str, TemplateFacts], members: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the variables for the template of every active member, by its name.

    Args:
        given: the option ``chat_template_kwargs``: variables for all members, and dicts of
            variables under the names of members.
        facts: what is known of the templates of the active members, by name.
        members: names of all members of the ensemble.

    Raises:
        InvalidOptionError: a name is reserved, a value is not JSON, or no template reads the
            variable.
    """
    shared: dict[str, Any] = {}
    own: dict[str, Mapping[str, Any]] = {}
    for name, value in (given or {}).items():
        if name in members and isinstance(value, Mapping):
            own[name] = value
        else:
            shared[name] = value
    for variables in (shared, *own.values()):
        for name, value in variables.items():
            _check_variable(name, value)
    for name, value in shared.items():
        if not any(each.reads(name) for each in facts.values()):
            raise _unread(name, facts, members if isinstance(value, Mapping) else ())
    for member, variables in own.items():
        for name in variables:
            if member in facts and not facts[member].reads(name):
                raise _unread(name, {member: facts[member]})
    return {member: {**shared, **own.get(member, {})} for member in facts}


def _check_variable(name: Any, value: Any) -> None:
    if name in RESERVED:
        remedy = SET_OTHERWISE.get(name, "leave it out")
        raise InvalidOptionError(
            f"option {OPTION!r}: {name!r} is not a variable of a template that can be set here; "
            f"{remedy}"
        )
    if name in SWITCHES and not isinstance(value, bool):
        raise InvalidOptionError(
            f"option {OPTION!r}: {name!r} must be true or false; got {short_repr(value)}"
        )
    try:
        text = json.dumps({name: value}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOptionError(
            f"option {OPTION!r}: the value of {name!r} must be JSON ({error}); got "
            f"{short_repr(value)}"
        ) from None
    check_text(text, f"option {OPTION!r}")


def _unread(
    name: str, facts: Mapping[str, TemplateFacts], members: Sequence[str] = ()
) -> InvalidOptionError:
    """Return the error for a variable that no template reads.

    Args:
        name: the variable, or the wrong name of a member.
        facts: what is known of the templates that could read it.
        members: the names that `name` could be instead of a variable.
    """
    if members:
        return InvalidOptionError(
            f"option {OPTION!r}: {short_repr(name)} is neither a member nor a variable of a chat "
            f"template.{nearest(str(name), members)} Members: {', '.join(members)}."
        )
    read = sorted(set().union(*(each.variables or () for each in facts.values())))
    whose = (
        f"the chat template of member {next(iter(facts))!r} does not read"
        if len(facts) == 1
        else f"no chat template of the members {', '.join(map(repr, facts))} reads"
    )
    return InvalidOptionError(
        f"option {OPTION!r}: {whose} {short_repr(name)}.{nearest(str(name), read)} Variables that "
        f"can be set: {', '.join(read) or 'none'}."
    )
