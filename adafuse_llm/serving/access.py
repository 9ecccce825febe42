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
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.serving.bodies import HEADER
from adafuse_llm.serving.errors import ApiError, api_error
from adafuse_llm.serving_config import KEY, ServingConfig

logger = logging.getLogger(__name__)

PROBES: Final = frozenset({"/health", "/ready"})
"""Paths for probes. They need no key and accept any host, because probes use addresses. The log has
them at level DEBUG only, and so it has successes of ``/metrics``."""

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The request ids that clients may choose."""

OUTCOMES: Final = {408: "timeout", 429: "busy", 499: "cancelled", 504: "timeout"}
"""Outcomes by status. Those of other errors are ``refused`` and ``failed``."""

CLOSE: Final = {"Connection": "close"}
"""The header of an answer after which the rest of the request would be read as another one."""


@dataclass
class ServedRequest:
    """A request for the log and the metrics. Without an outcome, the status shows it."""

    id: str
    started: float = field(default_factory=time.perf_counter)
    outcome: str | None = None


CURRENT_REQUEST: Final[ContextVar[ServedRequest]] = ContextVar("CURRENT_REQUEST")
"""The request that the current task serves."""


def outcome_of(status: int) -> str:
    """Return the outcome that the access log and the metrics have for a status."""
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

    `count` is called with the path, the outcome and the seconds of every request to a path in
    `counted`. If there are no keys, clients need none.

    Raises:
        InvalidOptionError: a key is empty, or has characters that a header cannot have.
    """
    if isinstance(api_keys, str) or not all(map(KEY.fullmatch, api_keys)):
        raise InvalidOptionError(
            "API keys must be a list of texts of letters, digits and punctuation, without spaces"
        )
    chosen = [Middleware(AccessLog, prefix=config.root_path, count=count, counted=counted)]
    if config.allowed_hosts:
        chosen.append(Middleware(HostCheck, hosts=config.allowed_hosts))
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
    return [*chosen, *[Middleware(KeyCheck, keys=api_keys)] * bool(api_keys)]


class AccessLog:
    """Gives every request an id, logs one line when it ends, and answers unexpected errors.

    A client can choose the id with the header ``X-Request-ID``. Every response has this header.
    Paths may have the prefix, as where a proxy or another application shows the server, and more
    slashes than they need.
    """

    def __init__(
        self, app: ASGIApp, prefix: str, count: Callable[..., object], counted: Collection[str]
    ) -> None:
        self.app = app
        self._prefix = prefix
        self._count, self._counted = count, counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._prefix and not scope.get("root_path"):
            scope = {**scope, "root_path": self._prefix}
        prefix = scope.get("root_path", "")  # where another application or a proxy shows the server
        path = re.sub("/{2,}", "/", scope["path"])
        size = len(prefix) * path.startswith(prefix) + 1  # with the slash of the page
        scope = {**scope, "path": path[:size] + path[size:].rstrip("/")}
        given = Headers(scope=scope).get("x-request-id", "")
        call = ServedRequest(given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
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
            if status:  # the server closes the connection, so that the client sees a failure
                call.outcome = "failed"
                raise
            await api_error(error).response()(scope, receive, answer)
        except BaseException:  # such as a cancellation at shutdown
            call.outcome = "failed"
            raise
        finally:
            outcome = call.outcome or (outcome_of(status) if is_complete else "cancelled")
            seconds = time.perf_counter() - call.started
            path, client = scope["path"].removeprefix(prefix), scope.get("client")
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


class HostCheck:
    """Refuses requests for other host names, such as those of other sites' pages.

    A host ``*.example.org`` stands for all names with this end.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app = app
        self._hosts = [each.lower().strip("[]") for each in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Probes may use any name."""
        given = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        try:
            name = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            name = ""
        if (
            scope["type"] != "http"
            or _below(scope) in PROBES
            or name in self._hosts
            or any(host[0] == "*" and name.endswith(host[1:]) for host in self._hosts)
        ):
            await self.app(scope, receive, send)
            return
        message = (
            f"this server does not answer to the host name {given[:100]!r}. Use one of its own "
            "names, or start it with this one: -o allowed_hosts=NAME"
        )
        logger.warning("request %s is refused: %s", CURRENT_REQUEST.get().id, message)
        await ApiError(400, message, code="unknown_host").response()(scope, receive, send)


class KeyCheck:
    """Refuses requests without a valid key in the header ``Authorization: Bearer KEY``.

    The time that this takes does not depend on the keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = list(map(_digest, keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Probes and the page need no key."""
        if scope["type"] != "http" or _below(scope) in PROBES | {"", "/"}:
            await self.app(scope, receive, send)
            return
        header = Headers(scope=scope).get("authorization", "")
        scheme, _, key = header.partition(" ")
        given = _digest(key.strip())
        matches = sum([hmac.compare_digest(given, digest) for digest in self._digests])
        if matches and scheme.lower() == "bearer":
            await self.app(scope, receive, send)
            return
        problem = "the API key is not valid." if header else "the request has no API key."
        message = f"{problem} Send the header 'Authorization: Bearer KEY'."
        headers = {"WWW-Authenticate": "Bearer"}
        error = ApiError(401, message, code="invalid_api_key", headers=headers)
        await error.response()(scope, receive, send)


async def read_body(request: Request, config: ServingConfig) -> bytes:
    """Return the body of a request.

    One that is too large is read to its end, because many clients read the answer only then.

    Raises:
        ApiError: the body exceeds a limit.
        ClientDisconnect: the client left before the body was complete.
    """
    body, size, limit = bytearray(), 0, config.max_body_bytes
    try:
        with anyio.fail_after(config.body_timeout):
            async for part in request.stream():
                size += len(part)
                body += part if size <= limit else b""
    except TimeoutError:
        raise ApiError(
            408,
            f"the body of the request was not complete after {config.body_timeout:g} seconds "
            "(body_timeout). Send it faster, or send a shorter one.",
            code="body_timeout",
            headers=CLOSE,
        ) from None
    if size > limit:
        raise ApiError(
            413,
            f"the body of the request is too large: at most {limit:,} bytes are allowed "
            "(max_body_bytes). Send a shorter one.",
            code="request_too_large",
            headers=CLOSE,
        )
    if config.log_prompts and body:
        text = json.dumps(body.decode(errors="replace"))
        logger.info("request=%s body=%s", CURRENT_REQUEST.get().id, text)
    return bytes(body)


def _below(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
