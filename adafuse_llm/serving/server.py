"""Run the server in this process: listen, load the members, and stop on a signal."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.serving.service import Service
from adafuse_llm.serving_config import ServerConfig

END_SECONDS: Final = 10.0
"""Maximum seconds for members to finish their forward passes after the server has cancelled all
requests. Clients get the ends of their responses during this time."""

CLOSE_SECONDS: Final = 5.0
"""Maximum seconds for members to finish their forward passes when the server closes the engine."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections. Host ``::`` includes IPv4. Port 0 is any free one.

    Raises:
        InvalidInputError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=2048, dualstack_ipv6=both
        )
        # short parts of a stream wait 40 ms without this; asyncio sets it only on its own sockets
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = f"{error.strerror}. Choose another --host or --port."
        raise InvalidInputError(f"cannot listen at {host} port {port}: {reason}") from error


def url_of(host: str, listener: socket.socket) -> str:
    """Return the URL of a server, with the port of its socket."""
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
    """Serve until a signal, and return the exit code: 0 after SIGTERM, and 130 after SIGINT.

    Members load in the background. On SIGTERM or SIGINT (Ctrl-C), the server accepts no more
    connections. Running requests may take `ServingConfig.drain_seconds` more seconds; then they end
    with the text so far. The process ends even if a member hangs, and at once on a second signal.

    Raises:
        AdaFuseError: the members cannot be loaded.
    """

    def load_members() -> None:
        try:
            server.engine = load()
            service.open(server.engine)
            on_ready(server.engine)
        except BaseException as error:  # for the main thread, which raises it
            server.failure = error
            server.should_exit = True

    server = _Server(app, service, config)
    server.loader = threading.Thread(target=load_members, name="adafuse load", daemon=True)
    server.run([listener])
    code, still_runs = 130 if server.signal == signal.SIGINT else 0, False
    if server.engine is not None:
        server.engine.close(CLOSE_SECONDS)
        still_runs = bool(server.engine.scheduler.close(0))
    if still_runs or server.loader.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without waiting for threads
    if server.failure is not None:
        raise server.failure
    return code


class _Server(uvicorn.Server):
    """A server that, on a signal or a failure, lets its running requests end before it stops.

    The thread `loader` starts as soon as the server accepts connections.
    """

    loader: threading.Thread
    engine: AdaFuseEngine | None = None
    signal: int | None = None
    failure: BaseException | None = None

    def __init__(self, app: ASGIApp, service: Service, config: ServerConfig) -> None:
        # uvicorn warns of requests for another protocol, such as HTTP/2, although it answers them
        quiet = ("Unsupported upgrade", "No supported WebSocket")
        uvicorn_logger = logging.getLogger("uvicorn.error")
        uvicorn_logger.addFilter(lambda record: not record.getMessage().startswith(quiet))
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",  # not uvloop, even if it is installed
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,  # longer than the 60 of proxies, which should close first
                timeout_graceful_shutdown=math.ceil(config.drain_seconds + END_SECONDS),
            )
        )
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Stop on the first signal, and end the process on the second one."""
        if self.signal is not None:
            os._exit(128 + sig)
        self.signal = sig
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loader.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the service, and wait until its requests have ended."""
        self._service.begin_drain()
        await super().shutdown(sockets)
