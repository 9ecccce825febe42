"""Who may use the server: request ids, the access log, hosts, keys, origins and body sizes."""

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from adafuse_llm import AdaFuseEngine, InvalidOptionError
from adafuse_llm.backends import FakeBackend
from adafuse_llm.serving import ServingConfig, create_app
from adafuse_llm.serving.access import CURRENT_REQUEST, AccessLog, middlewares, read_body

pytestmark = pytest.mark.quick

LOGGER = "adafuse_llm.serving.access"
LOCAL = ("localhost", "127.0.0.1", "[::1]")


async def echo(request: Request) -> Response:
    body = await read_body(request, request.app.state.config)
    return JSONResponse({"size": len(body), "id": CURRENT_REQUEST.get().id})


async def fail(_: Request) -> Response:
    raise RuntimeError("secret path")


async def broken(_: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one"
        raise RuntimeError("secret path")

    return StreamingResponse(parts())


def client(keys: tuple[str, ...] = (), **options: Any) -> httpx.AsyncClient:
    """A client of an application that has only the server's middlewares."""
    routes = [
        *(Route(path, echo, methods=["GET", "POST"]) for path in ("/", "/health", "/echo")),
        *(Route("/fail", fail), Route("/broken", broken)),
    ]
    config = ServingConfig(**options)
    app = Starlette(routes=routes, middleware=middlewares(config, keys))
    app.state.config = config
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")


def error(response: httpx.Response) -> dict[str, Any]:
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return found


async def test_every_request_has_an_id_and_a_line_in_the_log(caplog) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with client() as http:
        headers = {"X-Request-ID": "job-17.a_b"}
        chosen = await http.post("/echo?token=hidden", content=b"prompt", headers=headers)
        made = await http.get("/echo%0Aline", headers={"X-Request-ID": "a b"})
        unnamed = await http.get("/health")
    assert chosen.headers["x-request-id"] == chosen.json()["id"] == "job-17.a_b"
    for response in (made, unnamed):
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
    first, second = caplog.messages
    start = "request=job-17.a_b client=127.0.0.1 method=POST path=/echo status=200 ms="
    assert first.startswith(start)
    assert float(first.removeprefix(start).split()[0]) < 60_000
    assert first.endswith(" outcome=ok")
    assert "path=/echo%0Aline status=404" in second
    assert second.endswith("outcome=refused")
    assert "hidden" not in caplog.text
    assert "prompt" not in caplog.text


async def test_an_unexpected_error_says_nothing_about_the_server(caplog) -> None:
    async with client() as http:
        failed = await http.get("/fail", headers={"X-Request-ID": "r1"})
        cut = await http.get("/broken", headers={"X-Request-ID": "r2"})
    assert failed.status_code == 500
    assert error(failed)["code"] == "internal_error"
    assert "secret" not in failed.text
    assert failed.headers["x-request-id"] == "r1"
    assert (cut.status_code, cut.content) == (200, b"one")
    messages = [record.getMessage() for record in caplog.records]
    assert [m for m in messages if m.endswith(" failed")] == [f"request r{n} failed" for n in "12"]
    assert "secret path" in caplog.text  # with the traceback, for the operator


START = {"type": "http.response.start", "status": 200, "headers": []}
PART = {"type": "http.response.body", "body": b"a", "more_body": True}
LAST = {"type": "http.response.body", "body": b"b"}


@pytest.mark.parametrize(
    ("path", "sent", "error", "outcome", "is_logged"),
    [
        ("/x", [START, PART, LAST], None, "ok", True),
        ("/x", [START, PART], None, "cancelled", True),
        ("/x", [START, PART], RuntimeError, "failed", True),
        ("/x", [], asyncio.CancelledError, "failed", True),
        ("/x", [START, LAST], "timeout", "timeout", True),  # which the application sets
        ("/ready", [START, LAST], None, "ok", False),
        ("/metrics", [START, LAST], None, "ok", False),
        ("/metrics", [START, PART], None, "cancelled", True),
    ],
)
async def test_the_log_and_the_metrics_have_the_outcome_of_a_response(
    path: str, sent: list[Any], error: Any, outcome: str, is_logged: bool, caplog
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in sent:
            await send(message)
        if isinstance(error, str):
            CURRENT_REQUEST.get().outcome = error
        elif error:
            raise error

    async def send(message: Any) -> None:
        pass

    caplog.set_level(logging.INFO, LOGGER)
    counted: list[Any] = []
    log = AccessLog(app, "", lambda *call: counted.append(call[:2]), {path})
    scope = {"type": "http", "path": path, "method": "GET", "headers": []}
    with pytest.raises(error) if isinstance(error, type) else nullcontext():
        await log(scope, send, send)  # type: ignore[arg-type]
    assert counted == [(path, outcome)]
    assert [m.rpartition("=")[2] for m in caplog.messages if "ms=" in m] == [outcome] * is_logged


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"Authorization": "Bearer key-2"}, 200),
        ({"Authorization": "bearer  key-1"}, 200),
        ({}, 401),
        ({"Authorization": "Bearer key-3"}, 401),
        ({"Authorization": "Basic key-1"}, 401),
        ({"Authorization": b"Bearer k\xc3\xa9y"}, 401),
    ],
)
async def test_a_request_needs_one_of_the_keys(given: dict[str, Any], expected: int) -> None:
    async with client(("key-1", "key-2")) as http:
        response = await http.get("/echo", headers=given)
    assert response.status_code == expected
    if expected == 401:
        assert error(response)["code"] == "invalid_api_key"
        assert ("no API key" in error(response)["message"]) == (not given)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in response.headers


@pytest.mark.parametrize("keys", ["key", ("",), ("a b",), ("k\u00e9y",), ("a\n",)])
def test_keys_that_no_header_can_have_are_refused(keys: Any) -> None:
    with pytest.raises(InvalidOptionError, match="without spaces"):
        middlewares(ServingConfig(), keys)


async def test_all_keys_are_compared_whatever_the_first_one_gives(monkeypatch) -> None:
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: compared.append(pair) or real(*pair))
    async with client(("key-1", "key-2")) as http:
        await http.get("/echo", headers={"Authorization": "Bearer key-1"})
    assert len(compared) == 2
    assert not any(b"key" in part for pair in compared for part in pair)


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        *(("localhost:8000", True), ("[::1]:8000", True), ("a.b.example.org:443", True)),
        *(("localhost.evil.example", False), ("", False), ("evilexample.org", False)),
    ],
)
async def test_only_allowed_hosts_are_served(host: str, is_allowed: bool, caplog) -> None:
    async with client(allowed_hosts=(*LOCAL, "*.example.org")) as http:
        response = await http.get("/echo", headers={"Host": host})
        assert (await http.get("/health", headers={"Host": host})).status_code == 200
    assert response.status_code == (200 if is_allowed else 400)
    if not is_allowed:
        assert f"{host!r}" in error(response)["message"]
    assert [f"{host!r}" in text for text in caplog.messages] == [True] * (not is_allowed)


async def test_other_sites_pages_may_use_the_server_only_if_the_operator_says_so() -> None:
    preflight = {
        "Origin": "https://app.example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-os",
        "Access-Control-Request-Private-Network": "true",
    }
    async with client(("key-1",)) as http:
        closed = await http.options("/echo", headers=preflight)
    assert "access-control-allow-origin" not in closed.headers
    async with client(("key-1",), cors_origins="https://app.example.org") as http:
        opened = await http.options("/echo", headers=preflight)
        other = await http.options("/echo", headers={**preflight, "Origin": "https://x.example"})
        refused = await http.post("/echo", headers={"Origin": preflight["Origin"]})
    assert opened.status_code == 200
    assert opened.headers["access-control-allow-private-network"] == "true"
    assert "x-stainless-os" in opened.headers["access-control-allow-headers"]
    assert opened.headers["access-control-allow-methods"] == "GET, POST"
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    assert refused.status_code == 401  # a page can read the error
    assert refused.headers["access-control-allow-origin"] == preflight["Origin"]
    readable = refused.headers["access-control-expose-headers"].split(", ")
    assert {"X-Request-ID", "Retry-After"} <= {*readable}


@pytest.mark.parametrize("prefix", ["", "/a/llm"])
async def test_probes_and_the_page_need_no_key_and_proxies_may_add_a_prefix(prefix: str) -> None:
    async with client(("key-1",), root_path=prefix) as http:
        for path in (f"{prefix}/", f"{prefix}/health", "/health"):
            assert (await http.get(path)).status_code == 200
        for path in (f"{prefix}/echo", f"{prefix}x/health"):
            assert (await http.get(path)).status_code == 401
        if prefix:
            assert (await http.get(prefix)).headers["location"].endswith(f"{prefix}/")


@pytest.mark.parametrize("path", ["/echo/", "//echo", "/llm/echo/", "/llm//echo//"])
async def test_more_slashes_than_a_path_needs_change_nothing(path: str, caplog) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with client(root_path="/llm") as http:
        assert (await http.post(f"http://localhost{path}", content=b"x")).json()["size"] == 1
    assert "path=/echo " in caplog.text


async def test_a_server_that_another_application_mounts_counts_and_checks_its_own_paths() -> None:
    with AdaFuseEngine([FakeBackend("oak", lambda _: {"a": 1.0})]) as engine:
        inner = create_app(engine, api_keys=["key-1"])
        app = Starlette(routes=[Mount("/llm", inner)])
        transport = httpx.ASGITransport(app)
        key = {"Authorization": "Bearer key-1"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for path in ("/llm/", "/llm/health"):
                assert (await http.get(path)).status_code == 200
            body = {"prompt": "x", "max_tokens": 2}
            assert (await http.post("/llm/v1/completions", json=body)).status_code == 401
            answer = await http.post("/llm/v1/completions", json=body, headers=key)
            assert answer.json()["choices"][0]["text"] == "aa"
            metrics = (await http.get("/llm/metrics", headers=key)).text
    assert re.search(r'adafuse_requests_total{[^}]*outcome="ok"[^}]*} 1', metrics)


def test_a_prefix_is_a_path() -> None:
    assert ServingConfig(root_path="a/llm/").root_path == "/a/llm"
    with pytest.raises(InvalidOptionError, match="root_path"):
        ServingConfig(root_path="https://a.example/llm")


async def test_a_body_up_to_the_limit_is_read_and_a_longer_one_is_not() -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * 512

    async with client(max_body_bytes=2048) as http:
        fits = await http.post("/echo", content=b"x" * 2048)
        in_chunks = await http.post("/echo", content=chunks(4))
        declared = await http.post("/echo", content=b"x" * 2049)
        counted = await http.post("/echo", content=chunks(5))
    assert [each.json()["size"] for each in (fits, in_chunks)] == [2048, 2048]
    for response in (declared, counted):
        assert response.status_code == 413
        assert error(response)["code"] == "request_too_large"
