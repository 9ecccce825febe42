"""Running the server in this process: listening, loading, proxies, draining."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from adafuse_llm import AdaFuseEngine, InvalidInputError, LoadError
from adafuse_llm.backends import FakeBackend
from adafuse_llm.serving import server
from adafuse_llm.serving.app import build_app
from adafuse_llm.serving.server import listen, run, url_of
from adafuse_llm.serving.service import Service
from adafuse_llm.serving_config import ServerConfig
from tests.support.waiting import PATIENCE, background, wait_until

TOKENS = "/tokenize"


def small_engine() -> AdaFuseEngine:
    return AdaFuseEngine([FakeBackend("wren", lambda _: {"<end>": 1.0})])


@contextmanager
def running(load: Callable[[], AdaFuseEngine] = small_engine, **options: Any) -> Iterator[Any]:
    """A server in a thread: its service, listener, URL and, at its end, its result."""
    config = ServerConfig(**options)
    service, listener, made = Service(config), listen(config.host, 0), list[server._Server]()
    url = url_of(config.host, listener)

    class Recorded(server._Server):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_Server", Recorded)
        result = background(run, build_app(service), service, listener, load, config=config)
        wait_until(lambda: made and made[0].started and made[0].loader.ident)
    try:
        yield SimpleNamespace(
            service=service, listener=listener, url=url, server=made[0], result=result
        )
    finally:
        made[0].loader.join(PATIENCE)  # else the server ends the process
        made[0].should_exit = True
        result.exception(30)


@pytest.mark.quick
def test_the_server_answers_while_members_load_and_a_signal_closes_them() -> None:
    may_load = threading.Event()

    def load() -> AdaFuseEngine:
        assert may_load.wait(20)
        return small_engine()

    with running(load) as each:
        assert httpx.get(f"{each.url}/ready").status_code == 503
        may_load.set()
        wait_until(lambda: each.service.is_ready)
        response = httpx.get(f"{each.url}/ready")
        assert response.status_code == 200
        assert "server" not in response.headers
        engine = each.service.view()
        each.server.handle_exit(signal.SIGTERM, None)
    assert each.result.result() == 0
    assert engine.closed


def test_members_that_cannot_be_loaded_stop_the_server() -> None:
    def load() -> AdaFuseEngine:
        raise LoadError("there is no such folder")

    with running(load) as each, pytest.raises(LoadError):
        each.result.result(20)


def test_a_member_that_hangs_does_not_keep_the_process_alive(monkeypatch, caplog) -> None:
    may_end, ended = threading.Event(), list[int]()
    monkeypatch.setattr(server, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(os, "_exit", ended.append)

    def hang(_: str) -> dict[str, float]:
        may_end.wait(20)
        return {"<end>": 1.0}

    member = FakeBackend("wren", hang)
    with running(lambda: AdaFuseEngine([member]), drain_seconds=0) as each:
        wait_until(lambda: each.service.is_ready)
        answer = background(httpx.post, f"{each.url}/v1/completions", json={"prompt": "x"})
        wait_until(lambda: member.passes)
        each.server.handle_exit(signal.SIGTERM, None)
        assert answer.result().status_code == 503
        wait_until(lambda: ended)
        may_end.set()
    assert ended == [0]
    assert "'wren'" in caplog.text


def test_a_second_signal_ends_the_process_at_once(monkeypatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with running() as each:
        each.server.loader.join(PATIENCE)
        each.server.handle_exit(signal.SIGINT, None)
        assert ended == []
        each.server.handle_exit(signal.SIGINT, None)
    assert ended == [each.result.result()] == [130]


def test_a_busy_port_and_an_unknown_address_are_clear_errors() -> None:
    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInputError, match=f"port {port}: .*--port"):
            listen("127.0.0.1", port)
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(InvalidInputError, match=f"cannot listen at {host} port 0: .*--host"):
            listen(host, 0)


def test_a_proxy_on_this_machine_names_the_client(caplog) -> None:
    caplog.set_level(logging.INFO, "adafuse_llm.serving.access")
    with running() as each:
        headers = {"X-Forwarded-For": "203.0.113.1, 192.0.2.7"}
        httpx.post(f"{each.url}{TOKENS}", content=b"x", headers=headers)
    assert " client=192.0.2.7 " in caplog.messages[0]


def test_a_request_for_another_protocol_is_answered_quietly(caplog) -> None:
    with running() as each:
        for protocol in ("websocket", "h2c"):
            headers = {"Connection": "Upgrade", "Upgrade": protocol}
            assert httpx.get(f"{each.url}/health", headers=headers).status_code == 200
    assert not [each for each in caplog.messages if "pgrade" in each or "WebSocket" in each]


def test_a_client_that_sends_more_than_the_limit_reads_the_error() -> None:
    with running() as each:
        whole = httpx.post(f"{each.url}{TOKENS}", content=b"x" * 50_000_000, timeout=30)
        assert whole.status_code == 413
        assert httpx.get(f"{each.url}/health").status_code == 200
