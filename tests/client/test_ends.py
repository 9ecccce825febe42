"""Requests of `RemoteEngine` end: those that are cancelled, those that fail, and those of a closed
engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette")

import httpx
from starlette.requests import ClientDisconnect

from adafuse_llm import (
    AdaFuseEngine,
    EngineClosedError,
    InvalidInputError,
    QueueFullError,
    RemoteEngine,
    Request,
    RequestCancelledError,
    RequestTimeoutError,
    RuntimeConfig,
    ServerNotReadyError,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.client import connection, wire
from adafuse_llm.serving import ServingConfig, create_app
from adafuse_llm.serving.app import build_app
from adafuse_llm.serving.http import unless_disconnected
from adafuse_llm.serving.service import Service
from tests.support.serving import served

PATIENCE = 10.0
TURNS = [{"role": "user", "content": "x"}]
SCORES = 48
"""More requests than a server has threads."""


class Member(FakeBackend):
    """A member whose passes for prompts with "hang" wait for `gate`."""

    def __init__(self) -> None:
        super().__init__("m", self.write)
        self.gate, self.inside = threading.Event(), threading.Event()

    def write(self, text: str) -> dict[str, float]:
        if "hang" in text:
            self.inside.set()
            assert self.gate.wait(3 * PATIENCE)
        return {"a": 0.9, " ": 0.1}


@pytest.fixture
def member() -> Iterator[Member]:
    made = Member()
    yield made
    made.gate.set()


@pytest.fixture
def engine(member: Member) -> Iterator[AdaFuseEngine]:
    with AdaFuseEngine([member], runtime=RuntimeConfig(max_requests=2)) as made:
        yield made
        member.gate.set()


@pytest.fixture
def url(engine: AdaFuseEngine) -> Iterator[str]:
    with served(create_app(engine)) as address:
        yield address


@pytest.fixture
def remote(url: str) -> Iterator[RemoteEngine]:
    with RemoteEngine(url) as made:
        yield made


def background(call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args, **options)
    pool.shutdown(wait=False)
    return future


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def unfinished(engine: AdaFuseEngine) -> int:
    return engine.scheduler.running + engine.scheduler.waiting


# V3: scores ------------------------------------------------------------------------------------


def test_r3_v3_an_event_cancels_scores_on_the_server(
    member: Member, engine: AdaFuseEngine, remote: RemoteEngine
) -> None:
    cancel = threading.Event()
    running = background(remote.score, "hang", ["a"], cancel=cancel)
    batch = background(remote.score_batch, ["hang", "x"], [["a"]] * 2, cancel=cancel)
    assert member.inside.wait(PATIENCE)
    wait_until(lambda: unfinished(engine) == 3)
    cancel.set()
    for each in (running, batch):
        with pytest.raises(RequestCancelledError, match="cancelled before its texts were scored"):
            each.result(PATIENCE)
    wait_until(lambda: unfinished(engine) == 0)
    assert not member.gate.is_set()


def test_a_score_that_its_client_cancels_is_no_failure_of_the_server(
    member: Member, engine: AdaFuseEngine, caplog: pytest.LogCaptureFixture
) -> None:
    app, cancel = create_app(engine), threading.Event()
    with served(app) as url, RemoteEngine(url) as remote:
        running = background(remote.score, "hang", ["a"], cancel=cancel)
        assert member.inside.wait(PATIENCE)
        cancel.set()
        with pytest.raises(RequestCancelledError):
            running.result(PATIENCE)
        wait_until(lambda: not app.state.service.running)
        assert "failed" not in caplog.text


def test_requests_of_a_run_are_cancelled_one_by_one(
    member: Member, engine: AdaFuseEngine, remote: RemoteEngine
) -> None:
    cancels = [threading.Event(), threading.Event()]
    requests = [
        Request(prompt=prompt, options={"max_new_tokens": 4}, cancel=cancel)
        for prompt, cancel in zip(["hang", "hang, too"], cancels, strict=True)
    ]
    done = background(remote.open(requests).results)
    assert member.inside.wait(PATIENCE)
    cancels[0].set()
    wait_until(lambda: unfinished(engine) == 1)
    member.gate.set()
    first, second = done.result(PATIENCE)
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")


async def test_r3_v3_a_cancelled_task_ends_scores_on_the_server(
    member: Member, engine: AdaFuseEngine, remote: RemoteEngine
) -> None:
    task = asyncio.create_task(remote.ascore("hang", ["a"]))
    await asyncio.to_thread(member.inside.wait, PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, lambda: unfinished(engine) == 0)


def test_r3_v3_scores_of_a_server_have_time_limits_and_errors(
    member: Member, remote: RemoteEngine
) -> None:
    with pytest.raises(RequestTimeoutError):
        remote.score("hang", ["a"], timeout=0.1)
    member.gate.set()
    with pytest.raises(InvalidInputError, match="input 1 of the batch: continuations"):
        remote.score_batch(["x", "y"], [["a"], []])
    with pytest.raises(InvalidInputError, match="for each of the 2 inputs"):
        remote.score_batch(["x", "y"], [["a"]])
    assert remote.score_batch([], []) == []


async def test_r3_v3_abandoned_scores_delay_no_other_request(
    member: Member, engine: AdaFuseEngine, url: str
) -> None:
    body = {"requests": [{"prompt": "hang", "texts": ["a"]}]}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        scores = [asyncio.create_task(client.post(wire.OPEN, json=body)) for _ in range(SCORES)]
        await asyncio.to_thread(wait_until, lambda: unfinished(engine) == SCORES)
        for each in scores[: SCORES // 2]:
            each.cancel()
        for path, given in (("", {"prompt": "x"}), ("/chat", {"messages": TURNS})):
            answer = await client.post(f"/v1{path}/completions", json={"model": "none", **given})
            assert answer.status_code == 404
        await asyncio.to_thread(wait_until, lambda: unfinished(engine) == SCORES // 2)
        assert not member.gate.is_set()
        member.gate.set()
        answers = await asyncio.gather(*scores[SCORES // 2 :])
    assert {answer.status_code for answer in answers} == {200}


def test_r3_v3_scores_end_with_the_server(member: Member, engine: AdaFuseEngine) -> None:
    service = Service(ServingConfig())
    service.open(engine)
    with served(build_app(service, ())) as url, RemoteEngine(url) as remote:
        scores = background(remote.score, "hang", ["a"])
        assert member.inside.wait(PATIENCE)
        service.cancel_all()
        with pytest.raises(ServerNotReadyError, match="the server stops"):
            scores.result(PATIENCE)


def test_r3_v3_a_full_queue_refuses_scores(member: Member) -> None:
    runtime = RuntimeConfig(max_requests=1, max_waiting=0)
    with (
        AdaFuseEngine([member], runtime=runtime) as engine,
        served(create_app(engine)) as url,
        RemoteEngine(url) as remote,
    ):
        running = background(remote.score, "hang", ["a"])
        assert member.inside.wait(PATIENCE)
        with pytest.raises(QueueFullError):
            remote.score("x", ["a"])
        member.gate.set()
        assert running.result(PATIENCE).texts


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"inputs": [{"prompt": "x"}]}, "requests"),
        ({"requests": [{"prompt": "x", "messages": [TURNS[0]]}]}, "either a prompt or messages"),
        ({"requests": [{"prompt": "x", "texts": [1]}]}, "requests.0.texts.0"),
        ({"requests": [{"prompt": "x", "texts": []}]}, "at least one text"),
    ],
)
def test_r3_v3_odd_requests_for_scores_are_refused(
    url: str, body: dict[str, Any], reason: str
) -> None:
    answer = httpx.post(f"{url}{wire.OPEN}", json=body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


async def test_r3_v3_work_for_a_client_that_has_left_ends_at_the_second_request_to_end() -> None:
    """Before Python 3.12, `asyncio.wait_for` ignores a cancellation if its work is just done."""
    ended = False

    async def stubborn() -> None:
        nonlocal ended
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            ended = True

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(unless_disconnected(receive, stubborn()), PATIENCE)
    assert ended


# V4: closed engines ----------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_r3_v4_closing_ends_a_stream_that_is_being_opened(
    url: str, monkeypatch: pytest.MonkeyPatch, turns: int, moment: str
) -> None:
    """The engine is closed just before or after the head of the stream has arrived.

    With one turn of the loop in between, its reader is cancelled before it begins.
    """
    remote = RemoteEngine(url)
    lines = connection._lines

    async def closing(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
        async for line in lines(answer):
            if moment == "after":
                yield line
            remote.close()  # in the thread of the loop, which does not wait for itself
            for _ in range(turns):
                await asyncio.sleep(0)
            if moment == "before":
                yield line

    monkeypatch.setattr(connection, "_lines", closing)
    reading = background(lambda: list(remote.stream("x", max_new_tokens=10_000)))
    assert isinstance(reading.exception(PATIENCE), EngineClosedError)


async def test_r3_v4_closing_ends_what_tasks_wait_for(member: Member, url: str) -> None:
    for seconds in (0, 0.001, 0.005, 0.05):
        remote = RemoteEngine(url)
        tasks = [
            asyncio.create_task(each)
            for each in (remote.agenerate("hang"), remote.ascore("hang", ["a"]))
        ]
        await asyncio.sleep(seconds)
        await asyncio.to_thread(remote.close)
        for task in tasks:
            with pytest.raises(EngineClosedError):
                await asyncio.wait_for(task, PATIENCE)


# V6: events that raise -------------------------------------------------------------------------


class Raises(threading.Event):
    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        if self.looks < 0:
            raise ZeroDivisionError("a defect of the caller")
        return False


@pytest.mark.parametrize("looks", [0, 1, 2, 3])
@pytest.mark.parametrize("call", ["generate", "score"])
def test_r3_v6_an_event_that_raises_ends_only_its_own_request(
    member: Member, engine: AdaFuseEngine, remote: RemoteEngine, call: str, looks: int
) -> None:
    other = background(remote.generate, "hang", max_new_tokens=3)
    assert member.inside.wait(PATIENCE)
    given: Any = {"continuations": ["a"]} if call == "score" else {}
    with pytest.raises(ZeroDivisionError, match="a defect of the caller"):
        getattr(remote, call)("hang", cancel=Raises(looks), **given)
    wait_until(lambda: unfinished(engine) == 1)
    member.gate.set()
    assert other.result(PATIENCE).text == "aaa"
