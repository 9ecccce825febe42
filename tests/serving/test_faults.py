"""Members that fail or hang, clients that leave, bodies that are no requests, and the end."""

import asyncio
import gzip
import json
import logging
import threading
import time
from typing import Any

import httpx
import pytest

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.serving import ServingConfig, create_app, sse
from adafuse_llm.serving.app import build_app
from adafuse_llm.serving.service import THREADS, Service
from tests.support.serving import served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.quick

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
JSON = "application/json"
ENDLESS = {"prompt": "x", "max_tokens": 100_000, "stream": True, "adafuse": {"max_words": 1}}
SECRET = "the-colour-of-the-door"
USER = {"role": "user", "content": "x"}


def words(text):
    """Write words without end, and never be confident."""
    return {"a": 0.5, "b": 0.3, "c": 0.2} if text[-1] == " " else {" ": 0.9, "a": 0.1}


class Member(FakeBackend):
    def __init__(self, before=lambda call: None):
        super().__init__("one", words)
        self.calls = 0
        self._before = before

    def evaluate(self, queries):
        self.calls += 1
        self._before(self.calls)
        return super().evaluate(queries)


def slowly(_call):
    time.sleep(0.01)


def serve(member, **config):
    return served(create_app(AdaFuseEngine([member]), ServingConfig(**config)))


def events_of(lines):
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def test_a_failure_within_a_stream_is_its_last_event():
    def fail(call):
        if call >= 20:
            raise RuntimeError("broken")

    with (
        serve(Member(fail)) as url,
        httpx.stream("POST", url + COMPLETE, json=ENDLESS) as response,
    ):
        events = events_of(response.iter_lines())
    assert response.status_code == 200
    assert json.loads(events[0])["choices"]
    assert json.loads(events[-1])["error"]["code"] == "member_failed"
    assert "[DONE]" not in events


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_silent_stream_has_comments_and_its_errors_the_words_of_the_client(monkeypatch, path):
    monkeypatch.setattr(sse, "SILENT_SECONDS", 0.05)
    free = threading.Event()
    body = {"messages": [USER], "input": "x", "stream": True}
    with serve(Member(lambda _: free.wait(20)), request_timeout=2) as url:
        late = httpx.post(url + path, json=body, timeout=30)
        free.set()
    assert (late.status_code, late.text[:2]) == (200, ": ")
    assert late.text.count(": waiting\n\n") > 2
    last = json.loads(events_of(late.text.splitlines())[-1])
    message = (last if path == CHAT else last["response"])["error"]["message"]
    assert ("max_tokens" if path == CHAT else "max_output_tokens") in message


def test_a_client_that_leaves_ends_its_request():
    member = Member(slowly)
    app = create_app(AdaFuseEngine([member]))
    with served(app) as url, httpx.Client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(url + COMPLETE, json={**ENDLESS, "stream": False}, timeout=0.3)
        wait_until(lambda: app.state.service.running == 0)
        calls = member.calls
        time.sleep(0.1)
        assert member.calls - calls <= 8
        counted = httpx.get(f"{url}/metrics").text
    assert f'adafuse_requests_total{{outcome="cancelled",route="{COMPLETE}"}} 1.0' in counted


def test_the_end_of_the_server_completes_all_streams():
    service = Service(ServingConfig(drain_seconds=0.0))
    service.open(AdaFuseEngine([Member(slowly)]))
    body = {**ENDLESS, "max_tokens": 400}
    with served(build_app(service)) as url, httpx.Client() as client:
        with (
            client.stream("POST", url + COMPLETE, json=body) as one,
            client.stream("POST", url + COMPLETE, json=body) as two,
        ):
            streams = [one.iter_lines(), two.iter_lines()]
            for lines in streams:
                next(lines)
            service.begin_drain()
            for lines in streams:
                *_, last, done = events_of(lines)
                assert done == "[DONE]"
                (choice,) = json.loads(last)["choices"]
                assert choice["finish_reason"] == "length"
                assert json.loads(last)["adafuse"]["finish_reason"] == "cancelled"
        refused = client.post(url + COMPLETE, json=body)
        ready = client.get(url + "/ready")
        health = client.get(url + "/health")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (ready.status_code, health.status_code) == (503, 200)


async def test_work_whose_request_has_ended_is_cancelled():
    service = Service(ServingConfig())
    cancels: list[threading.Event] = []
    async with service.admitted(cancels.append):
        assert not cancels[0].is_set()
    assert cancels[0].is_set()


async def test_requests_without_a_grammar_do_not_wait_for_those_with_one():
    service, free = Service(ServingConfig()), threading.Event()
    slow = [
        asyncio.ensure_future(service.result(lambda _: free.wait(20), has_grammar=True))
        for _ in range(2 * THREADS)
    ]
    await asyncio.sleep(0.05)
    assert await asyncio.wait_for(service.result(lambda _: "quick"), 10) == "quick"
    free.set()
    assert all(await asyncio.gather(*slow))


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (400, b"", JSON),
        (400, b"{", JSON),
        (400, b'{"prompt": NaN}', JSON),
        (400, b"\xff\xfe{}", JSON),
        (400, b"[" * 100_000, JSON),
        (400, b'{"prompt": [1, 2]}', JSON),
        (400, b'{"prompt": "x", "max_tokens": 1%s}' % (b"0" * 5000), JSON),
        (400, b'{"prompt": "x", "adafuse": {"\\ud800": 1}}', JSON),
        (404, b'{"prompt": "x", "model": "%s"}' % (b"name" * 50_000), JSON),
        (400, b'{"prompt": "x", "adafuse": {"json_schema": "%s"}}' % (b"[" * 9999), JSON),
        (415, b'{"prompt": "x"}', "text/plain"),
        (400, gzip.compress(b'{"prompt": "x"}', mtime=0), JSON),
    ],
)
def test_a_body_that_is_no_request_is_refused(plain, status, content, kind):
    response = httpx.post(plain + COMPLETE, content=content, headers={"Content-Type": kind})
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.text) < 3000


@pytest.fixture(scope="module")
def plain():
    with serve(Member()) as url:
        yield url


def test_models_have_windows_and_a_request_that_cannot_fit_is_refused_before_it_is_encoded():
    members = [FakeBackend("small", words, context_window=100), FakeBackend("large", words)]
    empty = {"role": "user", "content": ""}
    with served(create_app(AdaFuseEngine(members))) as url:
        models = httpx.get(f"{url}/v1/models").json()["data"]
        windows = {each["id"]: each["max_model_len"] for each in models}
        assert windows == {"adafuse": 100, "small": 100, "large": None}
        large = {"prompt": "x" * 1601, "model": "large", "max_tokens": 2}
        assert httpx.post(url + COMPLETE, json=large).status_code == 200
        long = httpx.post(url + COMPLETE, json={"prompt": "x" * 1601})
        many = httpx.post(url + CHAT, json={"messages": [*[empty] * 200, USER]})
        stops = httpx.post(url + COMPLETE, json={"prompt": "x", "stop": ["x" * 801, "y" * 800]})
    for response in (long, many, stops):
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "of 100 tokens" in response.text


def test_the_time_limit_counts_before_the_decode_and_while_a_member_hangs(monkeypatch):
    free = threading.Event()
    engine = AdaFuseEngine([Member(lambda _: free.wait(20))])
    monkeypatch.setattr(engine, "check_grammar", lambda **_: free.wait(20))
    form = {"response_format": {"type": "json_object"}}
    with served(create_app(engine, ServingConfig(request_timeout=0.2))) as url:
        for fields in (form, {"max_tokens": 3}):
            late = httpx.post(url + CHAT, json={"messages": [USER], **fields}, timeout=20)
            assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        free.set()


def test_an_address_or_a_method_that_does_not_exist_is_told_what_does(plain):
    unknown = httpx.post(plain + "/v1/chat/completion", json={})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert CHAT in unknown.text
    wrong = httpx.get(plain + COMPLETE)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_no_log_has_a_prompt(caplog):
    def fail(call):
        if call == 3:
            raise RuntimeError("broken")

    bodies: list[Any] = [{"max_tokens": 2}, {"max_tokens": 0}, {SECRET: 1}]
    bodies += [{"max_tokens": 30, "adafuse": {"stop": SECRET}}]
    with serve(Member(fail)) as url, caplog.at_level(logging.DEBUG, "adafuse_llm"):
        for body in bodies:
            httpx.post(url + COMPLETE, json={"prompt": SECRET, **body})
            httpx.post(url + CHAT, json={"messages": [{"role": "user", "content": SECRET}]})
    assert caplog.text
    assert SECRET not in caplog.text
