"""Check the host, the key and the body's size of requests, give them ids, and log them.

`AccessLog` and `Check` are ASGI middlewares. They send errors in the form of OpenAI's API.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.serving.errors import ApiError, api_error
from adafuse_llm.serving_config import KEY, ServingConfig

logger = logging.getLogger(__name__)

PROBES: Final = frozenset({"/health", "/ready"})
"""Paths for probes: requests to them need no key, and may name any host, because probes send an IP
address. These requests, and successful ones to ``/metrics``, are in the log only at level DEBUG."""

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Pattern of the request ids that clients may choose."""

OUTCOMES: Final = {429: "busy", 499: "cancelled", 504: "timeout"}
"""Outcomes of requests by HTTP status. Other statuses mean ``ok``, ``refused`` or ``failed``."""


@dataclass
class LoggedRequest:
    """A request in the log and the metrics. If `outcome` is None, the response determines it."""

    id: str
    started: float = field(default_factory=time.perf_counter)
    outcome: str | None = None


CURRENT_REQUEST: Final[ContextVar[LoggedRequest]] = ContextVar("CURRENT_REQUEST")
"""The request that the current task is serving."""


def outcome_of(status: int) -> str:
    """Return the outcome of a request that ends with this HTTP status."""
    if status < 400:
        return "ok"
    return OUTCOMES.get(status, "failed" if status >= 500 else "refused")


def middlewares(
    config: ServingConfig,
    api_keys: Sequence[str] = (),
    *,
    count: Callable[[str, str, float], object] = lambda *_: None,
    counted: Collection[str] = (),
) -> list[Middleware]:
    """Return the middlewares of the server, the outermost first.

    They call `count` with the path, the outcome and the seconds of every request to a path in
    `counted`. Without keys, no request needs one.

    Raises:
        InvalidOptionError: `api_keys` is a text, or a key is empty or has unusable characters.
    """
    if isinstance(api_keys, str) or not all(map(KEY.fullmatch, api_keys)):
        raise InvalidOptionError(
            "API keys must be a list of texts of letters, digits and punctuation, without spaces"
        )
    chosen = [Middleware(AccessLog, prefix=config.root_path, count=count, counted=counted)]
    if config.allowed_hosts:
        chosen.append(Middleware(Check, refusal=partial(_unknown_host, config.allowed_hosts)))
    if config.cors_origins:
        chosen.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=("X-Request-ID", "Retry-After"),
            )
        )
    if api_keys:
        chosen.append(Middleware(Check, refusal=partial(_wrong_key, api_keys)))
    return chosen


class AccessLog:
    """Gives every request an id, logs how it ends, and answers it after an unexpected error.

    A client can choose the id with the header ``X-Request-ID``. Every response has this header.
    Paths may have additional slashes, and may begin with `prefix`, the path at which a proxy or
    another application offers the server.
    """

    def __init__(
        self, app: ASGIApp, prefix: str, count: Callable[..., object], counted: Collection[str]
    ) -> None:
        self.app = app
        self._prefix = prefix
        self._count, self._counted = count, counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an HTTP request. ASGI scopes of other types pass unchanged."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._prefix and not scope.get("root_path"):
            scope = {**scope, "root_path": self._prefix}
        prefix = scope.get("root_path", "")  # the path at which clients find the server
        path = re.sub("/{2,}", "/", scope["path"])
        if path not in ("/", f"{prefix}/"):  # the paths of the page
            path = path.rstrip("/")
        scope = {**scope, "path": path}
        chosen = Headers(scope=scope).get("x-request-id", "")
        call = LoggedRequest(chosen if REQUEST_ID.fullmatch(chosen) else uuid.uuid4().hex)
        CURRENT_REQUEST.set(call)
        status, is_complete = 0, False

        async def answer(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = call.id
            else:
                is_complete = not message.get("more_body")
            await send(message)

        try:
            await self.app(scope, receive, answer)
        except Exception as error:
            logger.exception("request %s failed", call.id)
            if status:  # the client sees a failure, because the server closes the connection
                call.outcome = "failed"
                raise
            await api_error(error).response()(scope, receive, answer)
        except BaseException:  # such as a cancellation at shutdown
            call.outcome = "failed"
            raise
        finally:
            outcome = call.outcome or (outcome_of(status) if is_complete else "cancelled")
            seconds = time.perf_counter() - call.started
            path, client = path.removeprefix(prefix), scope.get("client")
            is_quiet = path in PROBES or (path == "/metrics" and outcome == "ok")
            logger.log(
                logging.DEBUG if is_quiet else logging.INFO,
                "request=%s client=%s method=%s path=%s status=%s ms=%.0f outcome=%s",
                call.id,
                client[0] if client else "-",
                scope["method"],
                quote(path[:200]),
                status or "-",
                seconds * 1000,
                outcome,
            )
            if path in self._counted:
                self._count(path, outcome, seconds)


class Check:
    """Refuses the requests for which `refusal` returns an error. Probes always pass.

    `refusal` takes the path without the prefix, and the headers.
    """

    def __init__(self, app: ASGIApp, refusal: Callable[[str, Headers], ApiError | None]) -> None:
        self.app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with the error that `refusal` returns."""
        error = None
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            error = None if path in PROBES else self._refusal(path, Headers(scope=scope))
        await (self.app if error is None else error.response())(scope, receive, send)


def _unknown_host(hosts: Sequence[str], _path: str, headers: Headers) -> ApiError | None:
    """Return an error unless the host is in `hosts`. ``*.b.c`` means all hosts below ``b.c``."""
    sent = headers.get("host", "")
    try:
        name = urlsplit(f"//{sent}").hostname or ""
    except ValueError:
        name = ""
    for host in hosts:
        if name == host.lower().strip("[]") or (host[0] == "*" and name.endswith(host[1:].lower())):
            return None
    message = (
        f"this server does not answer to the host name {sent[:100]!r}. Use one of its own "
        "names, or start it with this one: -o allowed_hosts=NAME"
    )
    logger.warning("request %s is refused: %s", CURRENT_REQUEST.get().id, message)
    return ApiError(400, message, code="unknown_host")


def _wrong_key(keys: Sequence[str], path: str, headers: Headers) -> ApiError | None:
    """Return an error if a request has none of the keys as bearer token. The page needs no key."""
    header = headers.get("authorization", "")
    scheme, _, key = header.partition(" ")
    # compare the digests of all keys, so that the time of an answer reveals nothing about them
    sent = hashlib.sha256(key.strip().encode()).digest()
    digests = [hashlib.sha256(known.encode()).digest() for known in keys]
    fits = [hmac.compare_digest(sent, digest) for digest in digests]
    if path in ("", "/") or (any(fits) and scheme.lower() == "bearer"):
        return None
    problem = "the API key is not valid." if header else "the request has no API key."
    message = f"{problem} Send the header 'Authorization: Bearer KEY'."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def read_body(request: Request, config: ServingConfig) -> bytes:
    """Return the body of a request, or raise an `ApiError` if it is too large.

    Even a body that is too large is read to its end: many clients read the answer only then.
    """
    body, size, limit = bytearray(), 0, config.max_body_bytes
    async for part in request.stream():
        size += len(part)
        body += part if size <= limit else b""
    if size > limit:
        raise ApiError(
            413,
            f"the body of the request is too large: at most {limit:,} bytes are allowed "
            "(max_body_bytes). Send a shorter one.",
            code="request_too_large",
        )
    return bytes(body)
