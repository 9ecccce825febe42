"""What becomes of each field of a request.

Clients send fields of OpenAI's own service and of other servers. They are ignored with a warning,
or refused by a strict server. The few that determine the form of an answer, or what it answers, are
always refused, because the client could not read the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adafuse_llm.config import CONSTRAINTS, AdaFuseConfig
from adafuse_llm.errors import nearest, short_repr
from adafuse_llm.serving.errors import ApiError, invalid
from adafuse_llm.wire import EXTENSION

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Fields for the option ``max_new_tokens``."""

NO_LIMIT = -1
"""The value of these fields that asks for the rest of the context window."""

ALIASES = {**dict.fromkeys(LENGTHS, "max_new_tokens"), "min_tokens": "min_new_tokens"}
"""Fields that are options of the engine with another name."""

QUIET = frozenset(
    ("user", "metadata", "client_metadata", "safety_identifier", "service_tier", "prompt_cache_key")
) | {"add_generation_prompt"}
"""Fields that promise nothing about the answer, and that clients send without being asked."""

NO_TOOLS = "this server has no tools of its own"
NO_STORE = "this server stores nothing"
NO_IDS = "token ids differ between members"
WHOLE = f"{NO_STORE}. Send the whole conversation in 'input'"
LARK = f"its dialect differs from Lark. Send {{{EXTENSION!r}: {{'grammar': ...}}}}"
FORM = "send response_format, json_schema, regex or choices"

REFUSED: Mapping[str, str] = {
    "audio": "the members write text",
    "background": NO_STORE,
    **dict.fromkeys(("conversation", "previous_response_id"), WHOLE),
    "echo": "a response has new text only; RemoteEngine scores texts",
    **dict.fromkeys(("format", "guided_json", "guided_regex", "guided_choice"), FORM),
    "structured_outputs": FORM,
    "function_call": "send tool_choice",
    "functions": "send tools",
    **dict.fromkeys(("grammar", "guided_grammar"), LARK),
    "prompt": f"{NO_STORE}. Send messages or 'input'",
    "stop_token_ids": f"{NO_IDS}; send texts in stop",
    "suffix": "the members continue a text at its end only",
}
"""Fields that determine the form of an answer or what it answers, and what to do instead. Values
such as false or an empty list ask for nothing."""

OWN = frozenset(
    ("margin_threshold", "max_words", "branching_factor", "max_word_tokens", "max_word_letters")
) | {"weights", "use"}
"""Options that only an ensemble has. They count in the extension only, because a field of OpenAI's
API could have such a name tomorrow."""

OPTIONS = frozenset((*ALIASES, *AdaFuseConfig.model_fields)) - REFUSED.keys() - OWN
"""Fields that are options of the engine."""

SIMILARITY = 0.8
"""Lowest similarity of a suggested field. With less, ``stream`` is suggested for ``store``."""

HEADER = "X-AdaFuse-Warnings"
"""The header with the warnings that are known before the response begins."""

MAX_HEADER, MAX_WARNINGS = 2000, 32
"""Maximum characters of this header, and maximum number of ignored fields that are named."""


class Ignored:
    """The fields of a request that were ignored.

    Args:
        strict: whether to refuse the request instead.

    Attributes:
        warnings: what the client should know about them.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.warnings: list[str] = []
        self._strict = strict

    def add(self, name: str, reason: str = "") -> None:
        """Note that a field was ignored.

        Args:
            name: the name of the field, with the fields around it, such as ``a.b``.
            reason: why it is not supported, or what to send instead.

        Raises:
            ApiError: the server is strict.
        """
        reason = f": {reason}" if reason else ""
        if self._strict:
            raise refused(name, reason)
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(f"the field {short_repr(name)} was ignored{reason}")


def warnings_header(warnings: Sequence[str]) -> dict[str, str]:
    """Return warnings as a header, in ASCII; nothing if there are none."""
    text = " ".join("; ".join(warnings).split())
    shown = text.encode("ascii", "backslashreplace").decode()[:MAX_HEADER].rstrip()
    return {HEADER: shown} if shown else {}


class Extension(BaseModel):
    """The field with the options of the ensemble, which are the fields beyond these."""

    model_config = ConfigDict(strict=True, extra="allow")

    strategy: str | None = None
    rounds: bool = False
    enforce: bool | Literal["auto"] = "auto"
    instructions: str = ""
    texts: list[str] | None = None
    ends: bool = False
    check: bool = False
    timeout: float | None = Field(default=None, gt=0)


class Body(BaseModel):
    """The body of a request. It can also have all `OPTIONS`."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    adafuse: Extension = Field(default_factory=Extension)

    def options(self, ignored: Ignored) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the options of the engine, and where the body has them.

        Raises:
            ApiError: an option is unknown, or the body has two values of it.
        """
        options: dict[str, Any] = {}
        given: dict[str, str] = {}
        for name, value in (self.adafuse.model_extra or {}).items():
            if name not in AdaFuseConfig.model_fields:
                names = (*Extension.model_fields, *AdaFuseConfig.model_fields)
                raise invalid(
                    f"unknown option {EXTENSION}.{name[:100]}.{nearest(name, names)} The options "
                    f"are: {', '.join(names)}.",
                    f"{EXTENSION}.{name[:100]}",
                    "unknown_parameter",
                )
            if value is not None or name not in CONSTRAINTS:
                options[name], given[name] = value, f"{EXTENSION}.{name}"
        for name, value in (self.model_extra or {}).items():
            option = ALIASES.get(name, name)
            if name not in OPTIONS or (name in LENGTHS and value == NO_LIMIT):
                continue
            if name == "logit_bias" and isinstance(value, dict):
                texts = {text: bias for text, bias in value.items() if not text.isdigit()}
                if len(texts) < len(value):
                    ignored.add("logit_bias", f"{NO_IDS}; send texts")
                value = texts  # noqa: PLW2901
            if option in options and options[option] != value:
                raise invalid(
                    f"{given[option]} and {name} are the same option; send only one of them", name
                )
            options[option], given[option] = value, name
        return options, given


Kind = TypeVar("Kind", bound=Body)


def refused(name: str, reason: str, value: object = None) -> ApiError:
    """Return the error for a field that is not supported."""
    got = "" if value is None else f"; got {short_repr(value)}"
    return invalid(
        f"the field {short_repr(name)} is not supported{reason}{got}. Leave it out.",
        name[:100],
        "unsupported_parameter",
    )


def parse(kind: type[Kind], body: Mapping[str, Any], ignored: Ignored) -> Kind:
    """Check the fields of a body.

    Args:
        kind: the fields that the body can have, beside `OPTIONS`.
        body: the body.
        ignored: takes the fields that the body has in addition.

    Raises:
        ApiError: a field determines the form of the answer and is not supported, or has an invalid
            value; or the server is strict and does not know a field.
    """
    known = OPTIONS | kind.model_fields.keys()
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in known:
            continue
        if name in REFUSED:
            if value and value not in ("none", "auto"):
                raise refused(name, f": {REFUSED[name]}", value)
        elif value is not False and name not in QUIET:
            advice = nearest(name, known, similarity=SIMILARITY).strip()
            ignored.add(name, f"send it in {EXTENSION!r}" if name in OWN else advice)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
    # a text with a bracket, and these, are one of several types of a field, and no field
    names = [str(part) for part in problem["loc"] if part not in ("str", "bool")]
    name = ".".join(part for part in names if "[" not in part)
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    shown = "" if problem["type"] == "missing" else f"; got {short_repr(problem['input'])}"
    raise invalid(f"{name}: {message}{shown}", name)
