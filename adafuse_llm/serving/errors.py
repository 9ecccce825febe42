"""Errors of the server, in the form of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from adafuse_llm.errors import (
    AdaFuseError,
    CacheMemoryError,
    ContextWindowError,
    EngineClosedError,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
    MemberOutOfMemoryError,
    MemberUnavailableError,
    MissingDependencyError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerError,
    ServerNotReadyError,
)
from adafuse_llm.wire import EXTENSION, error_fields

INVALID, FAILED, BUSY, LATE = (
    "invalid_request_error",
    "server_error",
    "rate_limit_error",
    "timeout_error",
)
"""Types of errors."""

CONTEXT_CODE = "context_length_exceeded"
"""Code of a prompt that is too long. Frameworks recognize it."""

RETRY = {"Retry-After": "1"}
"""Tells clients that they can try again after a second."""

UNEXPECTED = (
    "the server failed unexpectedly; its log has the error, under the request id in the header "
    "X-Request-ID"
)
"""Message about an error that only the server's log describes."""

MAX_MESSAGE, MAX_PARAM = 2000, 100
"""Maximum characters of a message, and of the name of a field."""

KINDS: Mapping[int, type[AdaFuseError]] = {
    **dict.fromkeys((400, 413, 415), InvalidInputError),
    **dict.fromkeys((408, 504), RequestTimeoutError),
    429: QueueFullError,
    503: ServerNotReadyError,
}
"""Classes of errors that do not come from the engine, by status."""

_OPTION = re.compile(r"(?:unknown )?option '(\w+)'")
_PATH = re.compile(r"(?:\b[A-Za-z]:)?(?:[\\/][\w.@+~-]+){2,}[\\/]?")
"""An absolute path, or the end of a relative one."""


class ApiError(Exception):
    """An error that a client receives.

    Args:
        status: status code of the response.
        message: what is wrong, what is allowed and what to do.
        type: kind of the error, such as ``"invalid_request_error"``.
        param: name of the field that is wrong.
        code: short name of the error.
        headers: headers of the response.

    Attributes:
        fields: the error that `RemoteEngine` raises (`adafuse_llm.wire`).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,  # noqa: A002  # the name in the API
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.fields = {"error": _kind(status, code, param)}
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON data."""
        return {
            "error": {
                "message": _sendable(self.message, MAX_MESSAGE),
                "type": self.type,
                "param": None if self.param is None else _sendable(self.param, MAX_PARAM),
                "code": self.code,
            },
            EXTENSION: self.fields,
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a field that cannot be used."""
    return ApiError(400, message, param=param, code=code)


def not_ready(reason: str) -> ApiError:
    """Return the error for a request that the server cannot take now."""
    return ApiError(503, f"{reason}; try again later", type=FAILED, code="not_ready", headers=RETRY)


def api_error(error: BaseException) -> ApiError:
    """Return what a client learns about an error.

    Messages about invalid input are passed on. Messages about failures have one line and no paths.
    An unexpected error is only named as such.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (EngineClosedError, RequestCancelledError)):  # not without a client
        return not_ready("the server stops")
    if not isinstance(error, AdaFuseError):
        return ApiError(500, UNEXPECTED, type=FAILED, code="internal_error")
    status, kind, code = next(row for each, row in _ROWS.items() if isinstance(error, each))
    message = str(error)
    if kind == FAILED:
        message = _PATH.sub("[path]", " ".join(message.split()))
    elif kind == BUSY:
        message = "the server is busy: too many requests wait. Try again later."
    described = ApiError(
        status,
        message,
        type=kind,
        param=option_of(error),
        code=code,
        headers=RETRY if kind == BUSY else None,
    )
    described.fields = error_fields(error)
    return described


def option_of(error: BaseException) -> str | None:
    """Return the option that an error names, or None."""
    found = _OPTION.match(str(error)) if isinstance(error, InvalidOptionError) else None
    return None if found is None else found[1]


def _kind(status: int, code: str | None, param: str | None) -> str:
    """Return the class of an error that does not come from the engine."""
    kind = KINDS.get(status, ServerError)
    if kind is InvalidInputError and code == CONTEXT_CODE:
        return ContextWindowError.__name__
    return (InvalidOptionError if kind is InvalidInputError and param else kind).__name__


def _sendable(text: str, size: int) -> str:
    """Return a text that can be sent: not too long, and valid Unicode."""
    return text[:size].encode("utf-8", "backslashreplace").decode()


_ROWS: Mapping[type[AdaFuseError], tuple[int, str, str | None]] = {
    QueueFullError: (429, BUSY, "rate_limit_exceeded"),
    RequestTimeoutError: (504, LATE, "timeout"),
    ContextWindowError: (400, INVALID, CONTEXT_CODE),
    CacheMemoryError: (400, INVALID, CONTEXT_CODE),
    InvalidInputError: (400, INVALID, None),
    MissingDependencyError: (400, INVALID, "not_installed"),
    MemberOutOfMemoryError: (500, FAILED, "member_out_of_memory"),
    MemberUnavailableError: (500, FAILED, "member_unavailable"),
    MemberError: (500, FAILED, "member_failed"),
    AdaFuseError: (500, FAILED, None),
}
"""Status, type and code of the engine's errors. The first class that fits applies."""
