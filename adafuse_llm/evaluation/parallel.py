"""Answer several questions at the same time, and yield the results in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 2
"""Number of items per worker that `in_order` submits before it waits for the oldest result. With
more than one, a slow item seldom leaves workers idle. With few, an interruption loses little."""


def in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    cancel: threading.Event | None = None,
) -> Generator[Result]:
    """Call a function for every item in `workers` threads. Yield the results in item order.

    If the function sends requests to an engine, they share forward passes. After an error or
    Ctrl-C, `in_order` sets `cancel`, and then waits for the running calls.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="adafuse") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            if cancel is not None:
                cancel.set()
            raise
        finally:
            for future in waiting:
                future.cancel()
