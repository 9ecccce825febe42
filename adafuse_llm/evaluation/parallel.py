"""Several questions at the same time, with the results in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Call a function for every item in `workers` threads. Yield the results in item order.

    The engine decodes the requests of all threads in common forward passes. When the caller stops,
    calls that have not begun are dropped.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="adafuse") as pool:
        yield from pool.map(function, items)
