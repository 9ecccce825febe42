"""The form of a reply: which tools it can call, and the schema of a reply without calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from adafuse_llm.adapters.conversation import Turn
from adafuse_llm.adapters.reply import ReplyReader, call_key
from adafuse_llm.adapters.schema import closed_schema
from adafuse_llm.adapters.tool_grammar import tool_grammar
from adafuse_llm.config import CONSTRAINTS
from adafuse_llm.errors import (
    InvalidInputError,
    InvalidOptionError,
    MissingDependencyError,
    nearest,
    short_list,
    short_repr,
)
from adafuse_llm.interface import Engine
from adafuse_llm.text.conversation import Tool, function_of

Enforce = Literal["auto"] | bool
"""Whether to enforce a form. ``"auto"``: as far as possible. True: raise an error if a part of it
cannot be enforced. False: only describe it to the members."""

FORM_KEYWORDS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
"""Keywords of a framework's call that set the form of the reply, as in OpenAI's API."""

_COMPACT: Any = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
_ONLY_JSON = (
    "Reply with one JSON value that fits this JSON schema, and with nothing else: no explanation, "
    "no code fence, not the schema itself."
)


@dataclass(frozen=True)
class ReplyForm:
    """What a reply must look like: which tools it can call, and its schema if it calls none.

    Args:
        tools: the tools that the reply can call.
        choice: ``"auto"``, ``"required"`` or the name of a tool; ``"none"`` if the reply cannot
            call tools.
        parallel: whether the reply can have several calls.
        schema: a JSON schema of replies without calls; None for free text.
    """

    tools: Sequence[Tool] = ()
    choice: str = "none"
    parallel: bool = True
    schema: Mapping[str, Any] | None = None

    @property
    def calls_tools(self) -> bool:
        """Whether the reply can call tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def is_free(self) -> bool:
        """Whether the form allows every text."""
        return not self.calls_tools and self.schema is None

    @property
    def instructions(self) -> str:
        """Text that describes the form, for the end of the system message; "" if it needs none.

        Raises:
            InvalidInputError: the schema cannot be written as JSON.
        """
        lines = []
        if self.calls_tools and not self.parallel:
            lines.append("A reply can have at most one call.")
        if self.schema is not None:
            try:
                lines.append(f"{_ONLY_JSON}\n{json.dumps(self.schema, **_COMPACT)}")
            except (TypeError, ValueError) as error:
                raise InvalidInputError(f"the schema cannot be written as JSON: {error}") from error
        return "\n\n".join(lines)

    def check_constraints(
        self, given: Iterable[str], response_format: str = "response_format"
    ) -> None:
        """Refuse constraints next to tools or a schema, because both determine the reply's form.

        Raises:
            InvalidOptionError: `given`, the names of constraints, is not empty, and the form is not
                free. The message uses `response_format` as the name of the schema's field.
        """
        names = [*given]
        if names and not self.is_free:
            own = "tools" if self.calls_tools else response_format
            raise InvalidOptionError(
                f"{names[0]} cannot be combined with {own}, because both determine the form of the "
                "reply; send only one of them"
            )

    def after(self, turns: Iterable[Turn]) -> ReplyForm:
        """Return the form of the next reply in a conversation: tools, the schema, or both.

        Small members tend to invent the values of an object instead of calling a tool, and later to
        repeat a call instead of writing the object. So after a user's message, the schema
        is left out until a tool has returned a result, and the tools after a repeated call.
        """
        if not self.calls_tools or self.choice != "auto" or self.schema is None:
            return self
        calls: list[str] = []
        has_result = False
        for turn in turns:
            role = turn.get("role")
            if role in ("user", "human"):
                calls, has_result = [], False
            has_result |= role in ("tool", "function")
            functions = [function_of(call) for call in turn.get("tool_calls") or ()]
            calls += [call_key(call.get("name"), call.get("arguments")) for call in functions]
        if not has_result:
            return replace(self, schema=None)
        return replace(self, choice="none") if len({*calls}) < len(calls) else self

    def reader(self, options: Mapping[str, Any], *, as_text: bool = True) -> ReplyReader:
        """Return a reader for one reply in this form. `options` are those from `enforced`."""
        return ReplyReader(
            self.tools if self.calls_tools else (),
            parallel=self.parallel,
            as_text=as_text,
            in_pieces=options.get("grammar") is not None,
        )


def enforced(
    engine: Engine, form: ReplyForm, options: Mapping[str, Any], enforce: Enforce
) -> tuple[dict[str, Any], str]:
    """Return options that enforce the form of a reply, and a warning or "".

    A constraint in `options` takes precedence over the form, and the form over a constraint of the
    engine. With ``"auto"``, the warning names what cannot be enforced, which is left out.

    Raises:
        InvalidOptionError: `enforce` is True, and a part of the form cannot be enforced.
        MissingDependencyError: `enforce` is True, and the extra ``grammar`` is not installed.
    """
    if form.is_free or any(options.get(name) is not None for name in CONSTRAINTS):
        return {**options}, ""
    own = [name for name in CONSTRAINTS if getattr(engine.config, name) is not None]
    free = {**options, **dict.fromkeys(own)}
    if not enforce:
        return free, ""
    problems: list[str] | None = None if enforce is True else []
    constrained: dict[str, Any] = {**free}
    try:
        if not form.calls_tools and form.schema is not None:
            constrained["json_schema"] = closed_schema(form.schema, problems)[0]
        else:
            constrained["grammar"] = tool_grammar(
                form.tools,
                choice=form.choice,
                parallel=form.parallel,
                reply=form.schema,
                problems=problems,
            )
        engine.check_grammar(**constrained)
    except (InvalidOptionError, MissingDependencyError) as error:
        if enforce is True:
            raise
        return free, f"the form of replies is only described to the members, not enforced: {error}"
    if problems:
        return constrained, f"a part of the form of replies is not enforced: {'; '.join(problems)}"
    return constrained, ""


def schema_of(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the JSON schema in a ``response_format``; None for free text.

    A ``schema`` next to the ``type`` is read as well, because llama.cpp and OpenAI's Responses API
    have it there.

    Raises:
        InvalidInputError: `response_format` has another form.
    """
    if response_format is None:
        return None
    form = response_format if isinstance(response_format, Mapping) else {}
    inner = form.get("json_schema")
    places = form.get("schema"), inner.get("schema") if isinstance(inner, Mapping) else inner
    match form.get("type"), [place for place in places if place is not None]:
        case "json_schema", [Mapping() as schema]:
            return schema
        case "json_object", [Mapping() as schema] if inner is None:
            return schema
        case "json_object", []:
            return {"type": "object"}
        case "text", []:
            return None
    raise InvalidInputError(
        "response_format must be {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
        "{'type': 'json_object'} (also with 'schema') or {'type': 'text'}; got "
        f"{short_repr(response_format)}"
    )


def to_tool_choice(choice: str | bool | Mapping[str, Any] | None, names: Sequence[str]) -> str:
    """Convert a tool choice to ``auto``, ``none``, ``required`` or one of `names`.

    `choice` can also be None for ``auto``; True or ``any`` (unless a tool has this name) for
    ``required``; False for ``none``; or a dict in OpenAI's form.

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


def form_of(tools: Sequence[Tool], keywords: Mapping[str, Any]) -> ReplyForm:
    """Return the form of a reply that can call `tools`. `keywords` may set the rest of the form.

    Raises:
        InvalidInputError: a value has an unknown form, or the choice does not fit the tools.
    """
    parallel = keywords.get("parallel_tool_calls")
    if not isinstance(parallel, (bool, type(None))):
        raise InvalidOptionError(
            f"parallel_tool_calls must be True or False; got {short_repr(parallel)}"
        )
    return ReplyForm(
        tools,
        to_tool_choice(keywords.get("tool_choice"), [tool.name for tool in tools]),
        parallel is not False,
        schema_of(keywords.get("response_format")),
    )
