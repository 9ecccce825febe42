"""The requests that wait until they can start."""

from __future__ import annotations

import heapq
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count, islice

from adafuse_llm.runtime.request import Deliver, Request

CHECK_SECONDS = 0.05
"""Seconds between two looks at the flags of waiting requests."""

MAX_CHECKS = 500
"""Maximum number of flags of waiting requests that are looked at together. So a request that is
cancelled while 8,000 wait ends within 0.8 seconds, and the looks take less than 1 % of a core."""

MIN_HEAP = 64
"""Number of time limits up to which those of requests that no longer wait are kept."""


class WaitingRequests:
    """The requests that wait, in order of arrival.

    The cost of each method does not depend on the number of requests. Time limits are in a heap.
    Nobody tells when a `Request.cancel` is set, so these flags are looked at in turn, a limited
    number per second.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, Deliver] = OrderedDict()
        self._with_flag: OrderedDict[Request, None] = OrderedDict()  # the next to look at is first
        self._deadlines: list[tuple[float, int, weakref.ref[Request]]] = []  # a heap
        self._numbers = count()
        self._max_heap = MIN_HEAP
        self._next_check = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request, deliver: Deliver) -> None:
        """Add a request at the end."""
        self._requests[request] = deliver
        if request.cancel is not None:
            self._with_flag[request] = None
        if request.deadline is not None:
            if len(self._deadlines) >= self._max_heap:
                self._drop_deadlines()
            entry = (request.deadline, next(self._numbers), weakref.ref(request))
            heapq.heappush(self._deadlines, entry)

    def remove(self, request: Request) -> Deliver:
        """Remove a request, and return the function that receives its events."""
        self._with_flag.pop(request, None)
        return self._requests.pop(request)

    def to_end(self) -> list[Request]:
        """Return requests that are late, and those whose flags are found to be set."""
        now = time.monotonic()
        found: dict[Request, None] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]()
            if request is not None and request in self._requests and request.must_end():
                found[request] = None
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            for request in list(islice(self._with_flag, MAX_CHECKS)):
                self._with_flag.move_to_end(request)
                if request.must_end():
                    found[request] = None
        return list(found)

    def _drop_deadlines(self) -> None:
        """Drop the time limits of requests that no longer wait."""
        self._deadlines = [each for each in self._deadlines if each[2]() in self._requests]
        heapq.heapify(self._deadlines)
        self._max_heap = max(MIN_HEAP, 2 * len(self._deadlines))
