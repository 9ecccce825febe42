"""The fields of requests that this server does not have, and what becomes of each.

Clients send fields of OpenAI's own service and of other servers. They are ignored with a warning,
or refused by a strict server. The few that determine the form of an answer, or what it answers, are
always refused, because the client could not read the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.errors import nearest, short_repr
from adafuse_llm.serving.errors import invalid
from adafuse_llm.wire import EXTENSION

SIMILARITY = 0.8
"""Lowest similarity of a suggested field. With less, ``stream`` is suggested for ``store``."""

QUIET = frozenset(
    ("user", "metadata", "client_metadata", "safety_identifier", "service_tier", "prompt_cache_key")
)
"""Fields that promise nothing about the answer, and that clients send without being asked."""

NO_TOOLS = "this server has no tools of its own"
NO_STORE = "this server stores nothing"
NO_IDS = "token ids differ between members"

REFUSED: Mapping[str, str] = {
    "audio": "the members write text",
    "background": NO_STORE,
    "conversation": f"{NO_STORE}. Send the whole conversation in 'input'",
    "format": "send response_format",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "grammar": f"its dialect differs from Lark. Send {{{EXTENSION!r}: {{'grammar': ...}}}}",
    "guided_grammar": f"its dialect differs from Lark. Send {{{EXTENSION!r}: {{'grammar': ...}}}}",
    "previous_response_id": f"{NO_STORE}. Send the whole conversation in 'input'",
    "prompt": f"{NO_STORE}. Send messages or 'input'",
    "stop_token_ids": f"{NO_IDS}; send texts in stop",
    "suffix": "the members continue a text at its end only",
}
"""Fields that determine the form of an answer or what it answers, and what to do instead. Values
such as false or an empty list ask for nothing."""

HEADER = "X-AdaFuse-Warnings"
"""The header with the warnings that are known before the response begins."""

MAX_HEADER = 2000
"""Maximum characters of this header."""


MAX_WARNINGS = 32
"""Maximum number of ignored parts of a request that are named."""


class Ignored:
    """The parts of a request that were ignored.

    Args:
        strict: whether to refuse the request instead.

    Attributes:
        warnings: what the client should know about them.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.warnings: list[str] = []
        self._strict = strict

    def add(self, name: str, reason: str = "") -> None:
        """Note that a part was ignored.

        Args:
            name: the name of the field, with the fields around it, such as ``a.b``.
            reason: why it is not supported, or what to send instead.

        Raises:
            ApiError: the server is strict.
        """
        reason = f": {reason}" if reason else ""
        if self._strict:
            raise refused(name, reason)
        self.note(name, f"the field {short_repr(name)} was ignored{reason}")

    def note(self, name: str, warning: str) -> None:
        """Note that the members do not read a field as the client sent it.

        Raises:
            ApiError: the server is strict.
        """
        if self._strict:
            raise refused(name, f": {warning}")
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(warning)
        elif len(self.warnings) == MAX_WARNINGS:
            self.warnings.append("more fields were ignored")

    def keep(self, given: Mapping[str, Any], known: Collection[str], place: str) -> dict[str, Any]:
        """Return the known keys of an object; the others are ignored unless they are None."""
        for name, value in given.items():
            if name not in known and value is not None:
                self.add(f"{place}.{name}")
        return {name: value for name, value in given.items() if name in known}


def warnings_header(warnings: Sequence[str]) -> dict[str, str]:
    """Return warnings as a header, in ASCII; nothing if there are none."""
    text = " ".join("; ".join(warnings).split())
    shown = text.encode("ascii", "backslashreplace").decode()[:MAX_HEADER].rstrip()
    return {HEADER: shown} if shown else {}


Body = TypeVar("Body", bound=BaseModel)


def refused(name: str, reason: str, value: object = None) -> Exception:
    """Return the error for a field that is not supported."""
    got = "" if value is None else f"; got {short_repr(value)}"
    return invalid(
        f"the field {short_repr(name)} is not supported{reason}{got}. Leave it out.",
        name[:100],
        "unsupported_parameter",
    )


def parse(kind: type[Body], body: Mapping[str, Any], ignored: Ignored) -> Body:
    """Check the fields of a body.

    Args:
        kind: the fields that the body can have.
        body: the body.
        ignored: takes the fields that the body has in addition.

    Raises:
        ApiError: a field determines the form of the answer and is not supported, or has an invalid
            value; or the server is strict and does not know a field.
    """
    used = {}
    for name, value in body.items():
        if name in kind.model_fields:
            used[name] = value
        elif name in REFUSED and value and value not in ("none", "auto"):
            raise refused(name, f": {REFUSED[name]}", value)
        elif value not in (None, False) and name not in REFUSED and name not in QUIET:
            ignored.add(name, _advice(name, tuple(kind.model_fields)))
    try:
        return kind.model_validate(used)
    except ValidationError as error:
        raise _invalid_value(error) from None


def _invalid_value(error: ValidationError) -> Exception:
    """Return the error for the first field that pydantic refuses."""
    problem = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in problem["loc"] if not _is_type(part))
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    shown = "" if problem["type"] == "missing" else f"; got {short_repr(problem['input'])}"
    return invalid(f"{name}: {message}{shown}", name)


def _is_type(part: int | str) -> bool:
    """Return whether a part of a location is one of several types of a field, not a field."""
    return isinstance(part, str) and (part in ("str", "bool") or "[" in part)


def _advice(name: str, allowed: Sequence[str]) -> str:
    if name in AdaFuseConfig.model_fields:
        return f"it is an option of the ensemble; send {{{EXTENSION!r}: {{{name!r}: ...}}}}"
    return nearest(name, allowed, similarity=SIMILARITY).strip()
