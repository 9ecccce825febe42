"""Runs the server in this process: it listens, loads the members, and stops on a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, Literal

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.serving.service import Service
from adafuse_llm.serving_config import ServerConfig

__all__ = ["listen", "run", "url_of"]

logger = logging.getLogger(__name__)

BACKLOG: Final = 2048
"""Number of connections that wait to be accepted."""

KEEP_ALIVE_SECONDS: Final = 75
"""Seconds after which an idle connection is closed. Proxies usually close theirs after 60, and the
side that opened a connection should be the one that closes it."""

HEAD_SECONDS: Final = 15.0
"""Maximum seconds that a client may take for the headers of a request."""

BODY_MARGIN_SECONDS: Final = 5.0
"""Seconds after `ServingConfig.body_timeout` in which the application refuses a body that is not
complete. Then the connection is closed; the application reads no body of a refused request."""

END_SECONDS: Final = 10.0
"""Seconds for members to finish their forward passes, after all requests were cancelled. Until then
the clients get the ends of their responses."""

READ_SECONDS: Final = 0.5
"""Seconds in which a client has to read a part of the end of its response."""

TICK_SECONDS: Final = 0.1
"""Seconds between two looks at the connections while the server stops."""

CLOSE_SECONDS: Final = 5.0
"""Seconds for members to finish their forward passes, after all requests have ended."""

MARGIN_SECONDS: Final = 10.0
"""Seconds for everything else at the end. Then the process ends, whatever still runs."""

_PROBLEMS: Final = {
    errno.EADDRINUSE: "the port is in use by another program. Stop it, or choose another --port.",
    errno.EACCES: "this port needs special rights. Choose a --port above 1023.",
    errno.EADDRNOTAVAIL: "this machine does not have the address. Choose another --host.",
}


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections.

    Args:
        host: name or address of an interface of this machine. ``::`` also accepts IPv4.
        port: number of the port. With 0, the system chooses one.

    Raises:
        InvalidInputError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
        # asyncio does this only for sockets that it creates; without it, short parts wait 40 ms
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = _PROBLEMS.get(error.errno or 0, f"{error.strerror}. Choose another --host.")
        raise InvalidInputError(f"cannot listen at {host} port {port}: {reason}") from error


def url_of(host: str, listener: socket.socket) -> str:
    """Return the URL of a server, with the number of the real port."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: ASGIApp,
    service: Service,
    listener: socket.socket,
    load: Callable[[], AdaFuseEngine],
    *,
    config: ServerConfig,
    on_ready: Callable[[AdaFuseEngine], None] = lambda _: None,
) -> int:
    """Serve until a signal, and return the exit code.

    Members load in the background. Until they are loaded, the application answers that it is not
    ready. On SIGTERM or SIGINT (Ctrl-C), the server accepts no more connections. Running requests
    may take `ServingConfig.drain_seconds` more seconds; then they end with the text so far. A
    second signal ends the process at once. If a member hangs, this function ends the process
    instead of returning.

    Args:
        app: the application.
        service: the service of the application, without an engine.
        listener: a socket that accepts connections.
        load: function that loads the members.
        config: options of the server.
        on_ready: function that is called when the members are loaded.

    Returns:
        0 after SIGTERM, and 130 after SIGINT.

    Raises:
        AdaFuseError: the members cannot be loaded.
    """
    loaded: list[AdaFuseEngine] = []

    def load_members() -> None:
        try:
            engine = load()
            loaded.append(engine)
            service.open(engine)
            on_ready(engine)
        except BaseException as error:  # the main thread raises it
            server.failure = error
            server.should_exit = True

    loader = threading.Thread(target=load_members, name="adafuse load", daemon=True)
    server = _Server(_uvicorn_config(app, config), service, config, on_start=loader.start)
    try:
        server.run([listener])
        code = 130 if server.signal == signal.SIGINT else 0
        still_run = [_close(engine) for engine in loaded]
        if loader.is_alive() or any(still_run):
            _leave(code)
        if server.failure is not None:
            raise server.failure
        return code
    finally:
        server.watchdog.cancel()


def _uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",  # by default, uvicorn takes uvloop where another package installed it
        http=_Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=list(config.trusted_proxies),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(config.drain_seconds + END_SECONDS),
    )


def _close(engine: AdaFuseEngine) -> bool:
    """Close an engine, and return whether a forward pass still runs."""
    engine.close(CLOSE_SECONDS)
    return bool(engine.scheduler.close(0))


def _leave(code: int) -> None:
    """End the process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Server(uvicorn.Server):
    """A server that drains its service on a signal.

    Args:
        uvicorn_config: options of uvicorn.
        service: the service.
        config: options of the server.
        on_start: function that is called when connections and signals are accepted.

    Attributes:
        signal: the signal that stops the server, or None.
        failure: the error that stops the server, or None.
        watchdog: ends the process if the server does not stop in time.
    """

    def __init__(
        self,
        uvicorn_config: uvicorn.Config,
        service: Service,
        config: ServerConfig,
        *,
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(uvicorn_config)
        self.signal: int | None = None
        self.failure: BaseException | None = None
        self._service = service
        self._on_start = on_start
        self._options = config
        limit = config.drain_seconds + END_SECONDS + CLOSE_SECONDS + MARGIN_SECONDS
        self.watchdog = threading.Timer(limit, _give_up)
        self.watchdog.daemon = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Stop on the first signal, and end the process on the second one."""
        if self.signal is not None:
            os._exit(128 + sig)
        self.signal = sig
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Close connections whose clients are too slow."""
        options = self._options
        body = options.body_timeout + BODY_MARGIN_SECONDS
        self._close_stuck(HEAD_SECONDS, body, options.send_timeout)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the service, and wait until its requests have ended."""
        self.watchdog.start()
        self._service.begin_drain()
        slow = asyncio.ensure_future(self._close_slow())
        try:
            await super().shutdown(sockets)
        finally:
            slow.cancel()

    async def _close_slow(self) -> None:
        """Close connections that wait for their clients when the time to drain is over."""
        await asyncio.sleep(self._options.drain_seconds)
        while True:
            self._close_stuck(0, 0, READ_SECONDS)
            await asyncio.sleep(TICK_SECONDS)

    def _close_stuck(self, head: float, body: float, send: float) -> None:
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            assert isinstance(connection, _Connection)
            connection.close_if_stuck(now, head=head, body=body, send=send)


def _give_up() -> None:
    logger.error("the server did not stop in time, so the process ends now")
    _leave(1)


class _Connection(H11Protocol):
    """A connection that can tell whether its client is too slow."""

    _owed: Literal["head", "body"] | None = None
    _owed_by: object = None
    _owed_since = _unsent_since = math.inf
    _unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection. IPv4 clients of an IPv6 socket have their IPv4 addresses."""
        super().connection_made(transport)
        if self.client is not None:
            self.client = (self.client[0].removeprefix("::ffff:"), self.client[1])

    def close_if_stuck(self, now: float, *, head: float, body: float, send: float) -> None:
        """Close the connection if its client neither sends what it owes nor reads.

        Args:
            now: the time.
            head: seconds that a client may take for the headers of a request.
            body: seconds that a client may take for the body of a request.
            send: seconds that a client may take to read a part of the response.
        """
        if (unsent := self.transport.get_write_buffer_size()) != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        owed = self._what_is_owed()
        if owed != self._owed or self.cycle is not self._owed_by:  # else another request's body
            self._owed, self._owed_by, self._owed_since = owed, self.cycle, now
        if owed is not None and now - self._owed_since > (
            limit := head if owed == "head" else body
        ):
            self._close(f"did not send the {owed} of a request within {limit:g} seconds")
        elif unsent > 0 and now - self._unsent_since > send:
            self._close(f"read nothing of its response for {send:g} seconds")

    def _close(self, reason: str) -> None:
        client = self.client[0] if self.client is not None else "-"
        logger.info("client=%s disconnected: it %s", client, reason)
        self.transport.abort()

    def _what_is_owed(self) -> Literal["head", "body"] | None:
        """Return the part of a request that the client has to send next."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            return "head" if is_answered else None
        is_sending = self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused
        return "body" if is_sending else None
