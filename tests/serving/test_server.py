"""Running the server in this process: listening, loading, slow clients, draining."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx
import pytest

from adafuse_llm import AdaFuseEngine, InvalidInputError, LoadError
from adafuse_llm.backends import FakeBackend

pytest.importorskip("uvicorn", reason="needs the extra [serve]")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from adafuse_llm.serving import server
from adafuse_llm.serving.access import middlewares
from adafuse_llm.serving.server import listen, run, url_of
from adafuse_llm.serving.service import Service
from adafuse_llm.serving_config import ServerConfig


def small_engine() -> AdaFuseEngine:
    return AdaFuseEngine([FakeBackend("wren", lambda _: {"<end>": 1.0})])


class Running:
    """A server in a thread, with a tiny application."""

    server: server._Server

    def __init__(self, config: ServerConfig, load: Callable[[], AdaFuseEngine]) -> None:
        self.service = Service(config)
        self.listener = listen(config.host, 0)
        self.address = self.listener.getsockname()
        self.url = url_of(config.host, self.listener)
        self.ready = threading.Event()
        self.result: Any = None
        self._config, self._load = config, load
        self.thread = threading.Thread(target=self._run)

    def app(self) -> Starlette:
        async def health(_: Request) -> Response:
            return JSONResponse({"ready": self.service.is_ready})

        async def size(request: Request) -> Response:
            return JSONResponse(len(await request.body()))

        async def drip(_: Request) -> Response:
            async def parts():
                while self.service.is_ready:
                    yield b"x"
                    await asyncio.sleep(0.02)
                yield b"end"

            return StreamingResponse(parts())

        pages = {"/health": health, "/drip": drip}
        routes = [Route(path, page) for path, page in pages.items()]
        routes.append(Route("/size", size, methods=["POST"]))
        return Starlette(routes=routes, middleware=middlewares(self._config))

    def _run(self) -> None:
        try:
            self.result = run(
                self.app(),
                self.service,
                self.listener,
                self._load,
                config=self._config,
                on_ready=lambda _: self.ready.set(),
            )
        except BaseException as error:
            self.result = error


@contextmanager
def running(load: Callable[[], AdaFuseEngine] = small_engine, **options: Any) -> Iterator[Running]:
    each = Running(ServerConfig(**options), load)
    made: list[server._Server] = []

    class Recorded(server._Server):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(self)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "_Server", Recorded)
            each.thread.start()
            while not made:
                time.sleep(0.01)
        each.server = made[0]
        yield each
    finally:
        made[0].should_exit = True
        each.thread.join(30)
        assert not each.thread.is_alive()


def connected(address: Any, text: bytes) -> socket.socket:
    """A connection on which a client has sent a text."""
    client = socket.create_connection(address, timeout=20)
    client.sendall(text)
    return client


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def read_all(client: socket.socket) -> bytes:
    """Read what the server sends before it closes the connection.

    If more of the request arrives after that, the system resets the connection instead.
    """
    found = bytearray()
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            found += part
    return bytes(found)


def test_the_server_answers_while_members_load_and_then_serves() -> None:
    may_load = threading.Event()

    def load() -> AdaFuseEngine:
        assert may_load.wait(20)
        return small_engine()

    with running(load) as each:
        assert httpx.get(f"{each.url}/health").json() == {"ready": False}
        may_load.set()
        assert each.ready.wait(20)
        response = httpx.get(f"{each.url}/health")
        assert response.json() == {"ready": True}
        assert "server" not in response.headers
        engine = each.service.engine
    assert each.result == 0
    assert engine.closed


def test_members_that_cannot_be_loaded_stop_the_server() -> None:
    def load() -> AdaFuseEngine:
        raise LoadError("there is no such folder")

    with running(load) as each:
        each.thread.join(20)
    assert isinstance(each.result, LoadError)


@contextmanager
def stream_of(each: Running) -> Iterator[httpx.Response]:
    """A stream that ends when the server drains."""
    assert each.ready.wait(20)
    with httpx.stream("GET", f"{each.url}/drip", timeout=20) as stream:
        yield stream


def test_a_signal_drains_the_service_and_running_streams_end_properly() -> None:
    with running() as each, stream_of(each) as stream:
        parts = stream.iter_raw()
        assert next(parts)
        each.server.handle_exit(signal.SIGTERM, None)
        rest = b"".join(parts)
    assert rest.endswith(b"end")
    assert each.result == 0


def test_a_busy_port_and_an_unknown_address_are_clear_errors() -> None:
    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInputError, match=f"port {port}: Address already in use"):
            listen("127.0.0.1", port)
    with pytest.raises(InvalidInputError, match=r"assign requested address.*Choose another"):
        listen("192.0.2.1", 0)
    with pytest.raises(InvalidInputError, match=r"cannot listen at no.such.host.invalid port 0"):
        listen("no.such.host.invalid", 0)


@pytest.mark.parametrize(("proxies", "client"), [((), "127.0.0.1"), ("127.0.0.0/8", "192.0.2.7")])
def test_only_trusted_proxies_name_the_client(caplog, proxies: Any, client: str) -> None:
    caplog.set_level(logging.INFO, "adafuse_llm.serving.access")
    with running(trusted_proxies=proxies) as each:
        headers = {"X-Forwarded-For": "203.0.113.1, 192.0.2.7"}
        httpx.post(f"{each.url}/size", content=b"x", headers=headers)
    assert f" client={client} " in caplog.messages[0]


UPLOAD = b"POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"


@contextmanager
def trickled(client: socket.socket, pause: float = 0.05) -> Iterator[None]:
    """Send a byte again and again, as long as the connection takes it."""
    ended = threading.Event()

    def send() -> None:
        with suppress(OSError):
            while not ended.wait(pause):
                client.sendall(b"x")

    thread = threading.Thread(target=send)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_a_request_for_another_protocol_is_answered_quietly(caplog) -> None:
    with running() as each:
        for protocol in ("websocket", "h2c"):
            headers = {"Connection": "Upgrade", "Upgrade": protocol}
            assert httpx.get(f"{each.url}/health", headers=headers).status_code == 200
    assert not [each for each in caplog.messages if "pgrade" in each or "WebSocket" in each]


def test_a_body_that_trickles_is_cut(caplog) -> None:
    caplog.set_level(logging.INFO, "adafuse_llm.serving.access")
    with running(body_timeout=0.5) as each, connected(each.address, UPLOAD) as client:
        began = time.monotonic()
        with trickled(client):
            answer = read_all(client)
        assert 0.4 < time.monotonic() - began < 5
        wait_for(lambda: caplog.messages)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == "body_timeout"
    assert "not complete after 0.5 seconds (body_timeout)" in error["message"]
    assert caplog.messages[0].endswith("outcome=timeout")


def test_a_client_that_sends_more_than_the_limit_reads_the_error(caplog) -> None:
    caplog.set_level(logging.INFO, "adafuse_llm.serving.access")
    with running() as each:
        whole = httpx.post(f"{each.url}/size", content=b"x" * 50_000_000, timeout=30)
        assert whole.status_code == 413
        assert whole.headers["connection"] == "close"
        assert whole.json()["error"]["code"] == "request_too_large"
        wait_for(lambda: caplog.messages)
        assert httpx.get(f"{each.url}/health").status_code == 200
    assert caplog.messages[0].endswith("outcome=refused")
