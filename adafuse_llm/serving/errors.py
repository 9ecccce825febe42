"""Errors of the server, in the form of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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

NOT_READY = "not_ready"
"""Code of a server that cannot take the request now."""

RETRY_SECONDS = 1
"""Seconds after which a client can try again if the server is busy or not ready."""

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
        retry_after: seconds after which the client can try again.
        headers: other headers of the response.

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
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.fields = {"error": _kind(status, code, param)}
        wait = {} if retry_after is None else {"Retry-After": str(retry_after)}
        self.headers: Mapping[str, str] = {**(headers or {}), **wait}

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
    return ApiError(
        503,
        f"{reason}; try again later",
        type=FAILED,
        code=NOT_READY,
        retry_after=RETRY_SECONDS,
    )


def api_error(error: BaseException) -> ApiError:
    """Return what a client learns about an error.

    Messages about invalid input are passed on. Messages about failures have one line and no paths.
    An unexpected error is only named as such.
    """
    if isinstance(error, ApiError):
        return error
    described = next(
        (describe(error) for kind, describe in _DESCRIBED.items() if isinstance(error, kind)),
        ApiError(500, UNEXPECTED, type=FAILED, code="internal_error"),
    )
    if isinstance(error, AdaFuseError) and described.code != NOT_READY:
        described.fields = error_fields(error)
    return described


def option_of(error: BaseException) -> str | None:
    """Return the option that an error names, or None."""
    found = _OPTION.match(str(error)) if isinstance(error, InvalidOptionError) else None
    return None if found is None else found[1]


def without_paths(text: str) -> str:
    """Return a message of the server without paths, in one short line."""
    return _PATH.sub("[path]", " ".join(text.split()))


def _kind(status: int, code: str | None, param: str | None) -> str:
    """Return the class of an error that does not come from the engine."""
    kind = KINDS.get(status, ServerError)
    if kind is InvalidInputError and code == CONTEXT_CODE:
        return ContextWindowError.__name__
    return (InvalidOptionError if kind is InvalidInputError and param else kind).__name__


def _sendable(text: str, size: int) -> str:
    """Return a text that can be sent: not too long, and valid Unicode."""
    return text[:size].encode("utf-8", "backslashreplace").decode()


def _busy(_: BaseException) -> ApiError:
    return ApiError(
        429,
        "the server is busy: too many requests wait. Try again later.",
        type=BUSY,
        code="rate_limit_exceeded",
        retry_after=RETRY_SECONDS,
    )


def _failed(code: str | None = None) -> Callable[[BaseException], ApiError]:
    return lambda error: ApiError(500, without_paths(str(error)), type=FAILED, code=code)


def _invalid(code: str | None = None) -> Callable[[BaseException], ApiError]:
    return lambda error: invalid(str(error), option_of(error), code)


_DESCRIBED: Mapping[type[AdaFuseError], Callable[[BaseException], ApiError]] = {
    QueueFullError: _busy,
    RequestTimeoutError: lambda error: ApiError(504, str(error), type=LATE, code="timeout"),
    EngineClosedError: lambda _: not_ready("the server stops"),
    RequestCancelledError: lambda _: not_ready("the server stops"),  # only then, without a client
    ContextWindowError: _invalid(CONTEXT_CODE),
    CacheMemoryError: _invalid(CONTEXT_CODE),
    InvalidInputError: _invalid(),
    MissingDependencyError: _invalid("not_installed"),
    MemberOutOfMemoryError: _failed("member_out_of_memory"),
    MemberUnavailableError: _failed("member_unavailable"),
    MemberError: _failed("member_failed"),
    AdaFuseError: _failed(),
}
"""How errors of the engine are described. The first class that fits applies."""
