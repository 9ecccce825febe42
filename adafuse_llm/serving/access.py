"""Who may use the server and how: paths, hosts, keys, sizes of bodies, request ids and the log.

These are ASGI middlewares. They answer errors in the form of OpenAI's API.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Final
from urllib.parse import quote

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.serving.errors import LATE, ApiError, api_error
from adafuse_llm.serving.http import error_response
from adafuse_llm.serving.openai_fields import HEADER
from adafuse_llm.serving.settings import KEY
from adafuse_llm.serving_config import ServingConfig

logger = logging.getLogger(__name__)

PROBES: Final = frozenset({"/health", "/ready"})
"""Paths for probes. They need no key and accept any host, because probes use addresses."""

OPEN: Final = PROBES | {"/"}
"""Paths that need no key."""

QUIET: Final = PROBES | {"/metrics"}
"""Paths that are requested every few seconds. The log has successes at level DEBUG only, and all
requests of probes."""

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The request ids that clients may choose."""

OUTCOMES: Final = {408: "timeout", 429: "busy", 499: "cancelled", 504: "timeout"}
"""Outcomes by status. Those of other errors are ``refused`` and ``failed``."""

Count = Callable[[str, str, float], object]
"""A function that counts a request: its path, its outcome, and its seconds."""


def middlewares(
    config: ServingConfig,
    api_keys: Sequence[str] = (),
    *,
    count: Count = lambda *_: None,
) -> list[Middleware]:
    """Return the middlewares of the server, the outermost first.

    Args:
        config: options of the server.
        api_keys: keys that clients may use. If there are none, clients need no key.
        count: function that counts requests when they end.

    Raises:
        InvalidOptionError: a key is empty, or has characters that a header cannot have.
    """
    if isinstance(api_keys, str) or not all(map(KEY.fullmatch, api_keys)):
        raise InvalidOptionError(
            "API keys must be a list of texts of letters, digits and punctuation, without spaces"
        )
    chosen = [Middleware(at_root_path, prefix=config.root_path)] if config.root_path else []
    chosen.append(Middleware(AccessLog, count=count))
    if config.allowed_hosts:
        hosts = [each.lower() for each in config.allowed_hosts]
        if any(each.startswith("[") for each in hosts):
            hosts.append("[")  # what older versions of Starlette read of an IPv6 address
        chosen.append(Middleware(HostCheck, allowed_hosts=hosts, www_redirect=False))
    if config.cors_origins:
        chosen.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=("X-Request-ID", "Retry-After", HEADER),
            )
        )
    if api_keys:
        chosen.append(Middleware(KeyCheck, keys=api_keys))
    chosen.append(
        Middleware(
            BodyLimit,
            limit=config.max_body_bytes,
            timeout=config.body_timeout,
            log_bodies=config.log_prompts,
        )
    )
    return chosen


_CALL: ContextVar[_Call | None] = ContextVar("_CALL", default=None)
"""The request that the current task serves."""


def request_id() -> str:
    """Return the id of the request that the current task serves; "-" if there is none."""
    call = _CALL.get()
    return "-" if call is None else call.id


def seconds_since_arrival() -> float:
    """Return the seconds since the request arrived that the current task serves."""
    call = _CALL.get()
    return 0.0 if call is None else time.perf_counter() - call.started


def note_outcome(outcome: str) -> None:
    """Set the outcome that the access log and the metrics have for the current request."""
    if (call := _CALL.get()) is not None:
        call.noted = outcome


def outcome_of(status: int) -> str:
    """Return the outcome that the access log and the metrics have for a status."""
    if status < 400:
        return "ok"
    return OUTCOMES.get(status, "failed" if status >= 500 else "refused")


def at_root_path(app: ASGIApp, prefix: str) -> ASGIApp:
    """Return an application that also serves its paths with a prefix."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(prefix)}
        await app(scope, receive, send)

    return call


class AccessLog:
    """Gives every request an id, logs one line when it ends, and answers unexpected errors.

    A client can choose the id with the header ``X-Request-ID``. Every response has this header.
    """

    def __init__(self, app: ASGIApp, count: Count) -> None:
        self.app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        call = _Call(scope, send)
        _CALL.set(call)
        try:
            await self.app(scope, receive, call.send)
        except Exception as error:
            logger.exception("request %s failed", call.id)
            if call.status:  # the server closes the connection, so that the client sees a failure
                call.noted = "failed"
                raise
            await error_response(api_error(error))(scope, receive, call.send)
        except BaseException:  # such as a cancellation at shutdown
            call.noted = "failed"
            raise
        finally:
            self._count(scope["path"], *call.end())


class _Call:
    """One request: its id, and what became of it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        self.id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.noted: str | None = None
        self.status = 0
        self.is_complete = False
        self._scope = scope
        self._send = send
        self.started = time.perf_counter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-ID"] = self.id
        elif not message.get("more_body"):
            self.is_complete = True
        await self._send(message)

    def end(self) -> tuple[str, float]:
        """Log what became of the request.

        Returns:
            The outcome, as `Metrics.request` calls it, and the seconds since the request arrived.
        """
        seconds = time.perf_counter() - self.started
        outcome = self.noted or (outcome_of(self.status) if self.is_complete else "cancelled")
        path, client = self._scope["path"], self._scope.get("client")
        is_quiet = path in PROBES or (path in QUIET and outcome == "ok")
        logger.log(
            logging.DEBUG if is_quiet else logging.INFO,
            "request=%s client=%s method=%s path=%s status=%s ms=%.0f outcome=%s",
            self.id,
            client[0] if client else "-",
            self._scope["method"],
            quote(path[:200]),
            self.status or "-",
            seconds * 1000,
            outcome,
        )
        return outcome, seconds


class HostCheck(TrustedHostMiddleware):
    """Refuses requests for other host names, such as those of other sites' pages."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Probes may use any name."""
        if scope["type"] == "http" and scope["path"] in PROBES:
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class KeyCheck:
    """Refuses requests without a valid key in the header ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            header = Headers(scope=scope).get("authorization", "")
            scheme, _, key = header.partition(" ")
            if not self._is_valid(key.strip()) or scheme.lower() != "bearer":
                problem = "the API key is not valid." if header else "the request has no API key."
                message = f"{problem} Send the header 'Authorization: Bearer KEY'."
                response = error_response(ApiError(401, message, code="invalid_api_key"))
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _is_valid(self, key: str) -> bool:
        """Compare a key with all valid ones. The time does not depend on the keys."""
        given = _digest(key)
        return sum([hmac.compare_digest(given, digest) for digest in self._digests]) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class BodyLimit:
    """Reads the body of a request before the application runs, up to a limit of size and time.

    The limits are in bytes and in seconds.
    """

    def __init__(self, app: ASGIApp, limit: int, timeout: float, log_bodies: bool) -> None:
        self.app = app
        self._limit = limit
        self._timeout = timeout
        self._logs_bodies = log_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            with anyio.fail_after(self._timeout):
                unread = [await self._read(receive)]
        except (ApiError, TimeoutError) as error:
            response = error_response(error if isinstance(error, ApiError) else self._too_slow())
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        if self._logs_bodies and (body := unread[0].get("body")):
            text = json.dumps(body.decode(errors="replace"))
            logger.info("request=%s body=%s", request_id(), text)

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> Message:
        """Return the whole body as one message, or the message that the client has left.

        Raises:
            ApiError: the body exceeds the limit. The rest of it was read and forgotten, because
                many clients read the answer only after they have sent everything.
        """
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return message
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            body += part if size <= self._limit else b""
        if size > self._limit:
            raise ApiError(
                413,
                f"the body of the request is too large: at most {self._limit:,} bytes are allowed "
                "(max_body_bytes). Send a shorter one.",
                code="request_too_large",
            )
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    def _too_slow(self) -> ApiError:
        return ApiError(
            408,
            f"the body of the request was not complete after {self._timeout:g} seconds "
            "(body_timeout). Send it faster, or send a shorter one.",
            type=LATE,
            code="body_timeout",
        )
