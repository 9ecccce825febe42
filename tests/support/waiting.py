"""Waiting for what other threads and processes do."""

import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

PATIENCE = 30.0
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
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: sys.exit(not task()))
    child.start()
    child.join(2 * PATIENCE)
    child.kill()
    child.join()
    return child.exitcode == 0
