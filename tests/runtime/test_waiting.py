"""Nobody waits for somebody else's request: queues and flags of callers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from adafuse_llm import (
    AdaFuseEngine,
    Request,
    RequestCancelledError,
    RuntimeConfig,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.runtime.job import Job
from adafuse_llm.runtime.waiting import CHECK_SECONDS, MAX_CHECKS, MIN_HEAP, WaitingJobs
from tests.support.waiting import PATIENCE, background, wait_until


def dots(text: str) -> dict[str, float]:
    return {" .": 0.9, END: 0.1}


# Flags that raise --------------------------------------------------------------------------


class Raises(threading.Event):
    """A flag that raises an exception after some looks at it."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        if self.looks == 0:  # only once
            raise ZeroDivisionError("a defect of the caller")
        return False


@pytest.mark.quick
@pytest.mark.parametrize("looks", [1, 5])
@pytest.mark.parametrize("max_requests", [1, 8])
def test_a_flag_that_raises_ends_only_its_own_request(looks: int, max_requests: int) -> None:
    """The request runs, or waits behind another one."""

    def slow(text: str) -> dict[str, float]:
        time.sleep(0.01)
        return dots(text)

    runtime = RuntimeConfig(max_requests=max_requests)
    with AdaFuseEngine([FakeBackend("dots", slow)], runtime=runtime) as engine:
        other = background(engine.generate, "x", max_new_tokens=30)
        wait_until(lambda: engine.scheduler.running)
        with pytest.raises(ZeroDivisionError, match="a defect of the caller"):
            engine.generate("y", cancel=Raises(looks), max_new_tokens=100_000)
        assert not other.done()
        assert other.result(PATIENCE).text == " ." * 30
        assert engine.scheduler.running == engine.scheduler.waiting == 0


# Long queues -------------------------------------------------------------------------------


class Counted(threading.Event):
    """A flag that counts the looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def is_set(self) -> bool:
        self.looks += 1
        return super().is_set()


def job(**options: Any) -> Job:
    steps: Iterator[object] = iter(())
    made = Job((), {}, (step for step in steps), cancelled=lambda: "cancelled", **options)
    made.start_clock()
    return made


def test_all_flags_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=CHECK_SECONDS)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    flags = [Counted() for _ in range(2 * MAX_CHECKS + 1)]
    waiting = WaitingJobs()
    for flag in flags:
        waiting.add(job(cancel=flag), print)
    assert not [each for _ in range(3) for each in waiting.to_end()]
    assert [flag.looks for flag in flags] == [2] * (MAX_CHECKS - 1) + [1] * (MAX_CHECKS + 2)
    flags[-1].set()
    found = [waiting.to_end() for _ in range(4)]
    assert [len(each) for each in found].count(0) >= 2
    assert [each.cancel for some in found for each in some][:1] == [flags[-1]]


def test_time_limits_end_waiting_requests_and_are_forgotten() -> None:
    waiting = WaitingJobs()
    late = [job(timeout=0.001 * seconds) for seconds in (3, 1, 2)]
    for each in (*late, job(timeout=1000), job()):
        waiting.add(each, print)
    gone = late.pop(0)
    waiting.remove(gone)
    time.sleep(0.01)
    assert waiting.to_end() == [late[0], late[1]]
    for _ in range(10 * MIN_HEAP):
        passing = job(timeout=1000)
        waiting.add(passing, print)
        waiting.remove(passing)
    assert len(waiting._deadlines) <= MIN_HEAP
    assert len(waiting) == 4


def test_an_abandoned_request_ends_without_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adafuse_llm.runtime.scheduler.POLL_SECONDS", 10 * PATIENCE)
    gate, inside = threading.Event(), threading.Event()

    def hang(text: str) -> dict[str, float]:
        inside.set()
        assert gate.wait(3 * PATIENCE)
        return dots(text)

    with AdaFuseEngine([FakeBackend("m", hang)], runtime=RuntimeConfig(max_requests=1)) as engine:
        first = background(engine.generate, "x", max_new_tokens=1)
        assert inside.wait(PATIENCE)
        runs = [engine.open([Request(prompt="y")]) for _ in range(2)]
        readers = [background(run.results) for run in runs]
        wait_until(lambda: engine.scheduler.waiting == 2)
        for run in runs:
            run.close()
        wait_until(lambda: engine.scheduler.waiting == 0)
        for reader in readers:
            with pytest.raises(RequestCancelledError):
                reader.result(PATIENCE)
        gate.set()
        assert first.result(PATIENCE).text == " ."
