"""The form of replies that a call asks for with tools or a response format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adafuse_llm.adapters.reply import ReplyReader
from adafuse_llm.adapters.schema import close_objects
from adafuse_llm.adapters.tool_grammar import tool_grammar
from adafuse_llm.errors import (
    InvalidInputError,
    InvalidOptionError,
    nearest,
    short_list,
    short_repr,
)
from adafuse_llm.text.conversation import Tool

ONE_CALL = "A reply can have at most one call."

_PLACES = {"schema", "json_schema"}
"""Keys of a response format whose value has a schema."""


@dataclass(frozen=True)
class ReplyForm:
    """The form of a reply.

    Args:
        tools: the tools that the reply can call.
        choice: ``"auto"``, ``"required"`` or the name of a tool; ``"none"`` if the reply cannot
            call tools.
        parallel: whether the reply can have several calls.
        schema: a JSON schema of replies without calls; None for free text.
        completes: as for `ReplyReader`.
    """

    tools: Sequence[Tool] = ()
    choice: str = "none"
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    completes: bool = True

    @property
    def calls_tools(self) -> bool:
        """Whether the reply can call tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def is_free(self) -> bool:
        """Whether every text has this form."""
        return not self.tools and self.schema is None

    @property
    def instructions(self) -> str:
        """Text for the end of the system message that describes the form; "" if none is needed.

        Raises:
            InvalidInputError: the schema cannot be written as JSON.
        """
        lines = [ONE_CALL] if self.calls_tools and not self.parallel else []
        if self.schema is not None:
            lines.append(schema_instructions(self.schema))
        return "\n\n".join(lines)

    def reader(self, *, as_text: bool = True) -> ReplyReader:
        """Return a reader of a reply with this form. `as_text` is as for `ReplyReader`."""
        calls_tools = self.calls_tools
        return ReplyReader(
            self.tools if calls_tools else (),
            parallel=self.parallel,
            calls_forbidden=bool(self.tools) and not calls_tools,
            completes=self.completes,
            as_text=as_text,
        )

    def constraint(self) -> dict[str, Any]:
        """Return the engine's option that enforces this form; empty if every text has it.

        Raises:
            GrammarError: the form cannot be enforced.
            MissingDependencyError: the extra ``adafuse-llm[grammar]`` is not installed.
        """
        if self.calls_tools or (self.tools and self.schema is None):
            grammar = tool_grammar(
                self.tools, choice=self.choice, parallel=self.parallel, reply=self.schema
            )
            return {"grammar": grammar}
        return {} if self.schema is None else {"json_schema": close_objects(self.schema)}


def schema_instructions(schema: Mapping[str, Any]) -> str:
    """Return instructions to reply in JSON. They belong at the end of the system message.

    Args:
        schema: a JSON schema of the reply.

    Raises:
        InvalidInputError: the schema cannot be written as JSON.
    """
    try:
        compact = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the schema cannot be written as JSON: {error}") from error
    return (
        "Reply with one JSON value that fits this JSON schema, and with nothing else: no "
        f"explanation, no code fence, not the schema itself.\n{compact}"
    )


def schema_of(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the JSON schema in a ``response_format``; None for free text.

    A schema in another place than in OpenAI's API is never dropped: ``schema`` beside the type, as
    llama.cpp and OpenAI's Responses API have it, counts, and every other one is an error.

    Raises:
        InvalidInputError: `response_format` has another form.
    """
    if response_format is None:
        return None
    items = response_format.items() if isinstance(response_format, Mapping) else ()
    match {name: value for name, value in items if value is not None}:
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}, **rest}:
            if "schema" not in rest:
                return schema
        case {"type": "json_schema" | "json_object", "schema": Mapping() as schema, **rest}:
            if "json_schema" not in rest:
                return schema
        case {"type": "json_object" | "text" as kind, **rest} if not _PLACES & rest.keys():
            return {"type": "object"} if kind == "json_object" else None
    raise InvalidInputError(
        "response_format must be {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
        "{'type': 'json_object'} (also with 'schema') or {'type': 'text'}; got "
        f"{short_repr(response_format)}"
    )


def to_tool_choice(choice: str | bool | Mapping[str, Any] | None, names: Sequence[str]) -> str:
    """Convert a tool choice to ``auto``, ``none``, ``required`` or the name of a tool.

    Args:
        choice: one of these; None for ``auto``; True or ``any`` for ``required``; False for
            ``none``; or a dict of OpenAI, such as ``{"type": "function", "function": {"name":
            ...}}``. If a tool has the name ``any``, the word is its name.
        names: the names of the tools.

    Raises:
        InvalidInputError: `choice` is neither a known value nor one of `names`.
    """
    resolved: object = choice
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        resolved = name or choice.get("type") or choice
    if resolved is None or isinstance(resolved, bool):
        resolved = {None: "auto", True: "required", False: "none"}[resolved]
    if resolved == "any" and "any" not in names:
        resolved = "required"
    allowed = ("auto", "none", "required", *names)
    if not isinstance(resolved, str) or resolved not in allowed:
        raise InvalidInputError(
            f"tool_choice must be 'any', a bool, or one of {short_list(allowed)}; got "
            f"{short_repr(choice)}.{nearest(str(resolved), allowed)}"
        )
    return resolved


def to_flag(name: str, value: object, default: bool) -> bool:
    """Return a keyword's value that is a bool; None stands for the default.

    Raises:
        InvalidOptionError: the value is neither a bool nor None.
    """
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name} must be True or False; got {short_repr(value)}")
    return value
