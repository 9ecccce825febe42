"""Answer several questions at the same time, and yield the results in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    with ThreadPoolExecutor(workers, thread_name_prefix="adafuse") as pool:
        try:
            yield from pool.map(function, items)
        except BaseException:
            if cancel is not None:
                cancel.set()
            raise
