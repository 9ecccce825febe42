"""Waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

PATIENCE = 10.0
"""Most seconds that a test waits."""


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
