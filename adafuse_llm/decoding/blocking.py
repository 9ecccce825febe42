"""Work of a request that no member does, such as that of a ranker's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BlockingWork(Generic[T]):
    """Work that would hold up other requests, so it runs on a lane of its own.

    A computation yields it like a query to a member, and continues when it is done.

    Args:
        name: what does the work, as messages about a request that waits for it call it.
        owner: object that does the work. One thread at a time uses it.
        work: function that does the work. It runs on the lane's thread.
    """

    def __init__(self, name: str, owner: object, work: Callable[[], T]) -> None:
        self.name = name
        self.lane = f"{name} {id(owner):x}"
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work."""
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error

    @property
    def result(self) -> T:
        """The result of the work, or the exception that it raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]
