"""Waiting for what other threads and processes do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

PATIENCE = 10.0
"""Most seconds that a test waits for a thread."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def background(call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """Call a function in a new thread, and return a future of its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args, **options)
    pool.shutdown(wait=False)
    return future


def in_child(task: Callable[[], object]) -> bool:
    """Return whether `task` gives a true result in a forked child, in time."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if task() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + 6 * PATIENCE
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    return done == (child, 0)
