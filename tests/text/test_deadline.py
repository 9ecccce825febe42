"""Deadlines of Python code."""

from __future__ import annotations

import threading
import time

import pytest

from adafuse_llm.text.deadline import run_within


def endless() -> None:
    while True:
        pass


@pytest.mark.quick
def test_work_in_time_returns_its_result_or_raises_its_error() -> None:
    assert run_within(5, lambda: "done") == "done"
    with pytest.raises(ZeroDivisionError):
        run_within(5, lambda: 1 / 0)
    with pytest.raises(TimeoutError, match="its own"):
        run_within(5, own_timeout)


def own_timeout() -> None:
    raise TimeoutError("its own")


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="counts no CPU time")
def test_work_that_waits_for_a_busy_machine_is_not_stopped() -> None:
    assert run_within(0.1, lambda: time.sleep(0.3) or "done") == "done"


@pytest.mark.quick
def test_an_endless_loop_ends_with_its_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(TimeoutError, match=r"0\.1 seconds"):
        run_within(0.1, endless)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_work_that_catches_every_exception_ends_too() -> None:
    ended = threading.Event()

    def stubborn() -> None:
        try:
            while True:
                try:
                    endless()
                except Exception:
                    time.sleep(0)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        run_within(0.1, stubborn)
    assert ended.wait(5)
