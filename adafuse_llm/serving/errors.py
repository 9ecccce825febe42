"""Errors of the server, in the form of OpenAI's API.

Code that reads or checks requests raises `ApiError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from adafuse_llm import errors
from adafuse_llm.errors import AdaFuseError, InvalidInputError, InvalidOptionError
from adafuse_llm.remote.wire import EXTENSION, error_fields

CONTEXT_CODE = "context_length_exceeded"
"""Code of the error for a prompt that is too long. Frameworks recognize this code."""

RETRY = {"Retry-After": "1"}
"""Header that asks clients to try again after a second."""

UNEXPECTED = (
    "the server failed unexpectedly; its log has the error, under the request id in the header "
    "X-Request-ID"
)

MAX_MESSAGE, MAX_PARAM = 2000, 100
"""Maximum number of characters in an error's message, and in the field name in ``param``."""

REFUSED = "invalid_request_error"
KINDS: Mapping[int, tuple[str, type[AdaFuseError]]] = {
    **dict.fromkeys((400, 413, 415), (REFUSED, InvalidInputError)),
    429: ("rate_limit_error", errors.QueueFullError),
    500: ("server_error", errors.ServerError),
    503: ("server_error", errors.ServerNotReadyError),
    504: ("timeout_error", errors.RequestTimeoutError),
}
"""By status: OpenAI's type of the error, and its class for `RemoteEngine` if it has no `cause`."""

ROWS: Mapping[type[AdaFuseError], tuple[int, str | None]] = {
    errors.QueueFullError: (429, "rate_limit_exceeded"),
    errors.RequestTimeoutError: (504, "timeout"),
    errors.ContextWindowError: (400, CONTEXT_CODE),
    errors.CacheMemoryError: (400, CONTEXT_CODE),
    InvalidInputError: (400, None),
    errors.MissingDependencyError: (400, "not_installed"),
    errors.MemberOutOfMemoryError: (500, "member_out_of_memory"),
    errors.MemberUnavailableError: (503, "member_unavailable"),
    errors.MemberError: (500, "member_failed"),
    AdaFuseError: (500, None),
}
"""Status and code of the engine's errors, by class. The first class that fits counts."""

_OPTION = re.compile(r"(?:unknown )?option '(\w+)'")
_PATH = re.compile(r"(?:\b[A-Za-z]:)?(?:[\\/][\w.@+~-]+){2,}[\\/]?")
"""An absolute path, or the end of a relative one. Errors of status 500 or 503 hide it."""


class ApiError(Exception):
    """An error that a client receives: a status, and fields of OpenAI's API.

    `param` is the name of the wrong field. `cause` is the error of the engine, if there is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        cause: AdaFuseError | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.type, kind = KINDS.get(status, (REFUSED, errors.ServerError))
        self.param, self.code = param, code
        self.headers = RETRY if headers is None and status in (429, 503) else headers
        if kind is InvalidInputError and param:
            kind = InvalidOptionError
        self._fields = {"error": kind.__name__} if cause is None else error_fields(cause)

    def response(self) -> Response:
        """Return the error as an HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON, with an extension for `RemoteEngine` (`adafuse_llm.remote.wire`)."""
        return {
            "error": {
                "message": self.message[:MAX_MESSAGE],
                "type": self.type,
                "param": self.param and self.param[:MAX_PARAM],
                "code": self.code,
            },
            EXTENSION: self._fields,
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for an invalid request. `param` is the name of the wrong field, if known."""
    return ApiError(400, message, param=param, code=code)


def not_ready(reason: str) -> ApiError:
    """Return the error for a request that the server cannot take now."""
    return ApiError(503, f"{reason}; try again later", code="not_ready")


def api_error(error: BaseException) -> ApiError:
    """Return the `ApiError` that a client receives in place of `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (errors.EngineClosedError, errors.RequestCancelledError)):
        return not_ready("the server stops")
    if not isinstance(error, AdaFuseError):
        return ApiError(500, UNEXPECTED, code="internal_error")
    status, code = next(row for kind, row in ROWS.items() if isinstance(error, kind))
    message = str(error)
    if status in (500, 503):
        message = _PATH.sub("[path]", " ".join(message.split()))
    elif status == 429:
        message = "the server is busy: too many requests wait. Try again later."
    return ApiError(status, message, param=option_of(error), code=code, cause=error)


def option_of(error: BaseException) -> str | None:
    """Return the option that an error names, or None."""
    found = _OPTION.match(str(error)) if isinstance(error, InvalidOptionError) else None
    return None if found is None else found[1]
