"""The jobs that wait until they can start."""

from __future__ import annotations

import heapq
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count, islice

from adafuse_llm.runtime.job import Deliver, Job

CHECK_SECONDS = 0.05
"""Seconds between two looks at the flags of waiting jobs."""

MAX_CHECKS = 500
"""Maximum number of flags of waiting jobs that are looked at together. So a job that is
cancelled while 8,000 wait ends within 0.8 seconds, and the looks take less than 1 % of a core."""

MIN_HEAP = 64
"""Number of time limits up to which those of jobs that no longer wait are kept."""


class WaitingJobs:
    """The jobs that wait, in order of arrival.

    The cost of each method does not depend on the number of jobs. Time limits are in a heap.
    Nobody tells when a `Job.cancel` is set, so these flags are looked at in turn, a limited
    number per second.
    """

    def __init__(self) -> None:
        self._jobs: OrderedDict[Job, Deliver] = OrderedDict()
        self._with_flag: OrderedDict[Job, None] = OrderedDict()  # the next to look at is first
        self._deadlines: list[tuple[float, int, weakref.ref[Job]]] = []  # a heap
        self._numbers = count()
        self._max_heap = MIN_HEAP
        self._next_check = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def add(self, job: Job, deliver: Deliver) -> None:
        """Add a job at the end."""
        self._jobs[job] = deliver
        if job.cancel is not None:
            self._with_flag[job] = None
        if job.deadline is not None:
            if len(self._deadlines) >= self._max_heap:
                self._drop_deadlines()
            entry = (job.deadline, next(self._numbers), weakref.ref(job))
            heapq.heappush(self._deadlines, entry)

    def remove(self, job: Job) -> Deliver:
        """Remove a job, and return the function that receives its events."""
        self._with_flag.pop(job, None)
        return self._jobs.pop(job)

    def to_end(self) -> list[Job]:
        """Return jobs that are late, and those whose flags are found to be set."""
        now = time.monotonic()
        found: dict[Job, None] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heapq.heappop(self._deadlines)[2]()
            if job is not None and job in self._jobs and job.must_end():
                found[job] = None
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            for job in list(islice(self._with_flag, MAX_CHECKS)):
                self._with_flag.move_to_end(job)
                if job.must_end():
                    found[job] = None
        return list(found)

    def _drop_deadlines(self) -> None:
        """Drop the time limits of jobs that no longer wait."""
        self._deadlines = [each for each in self._deadlines if each[2]() in self._jobs]
        heapq.heapify(self._deadlines)
        self._max_heap = max(MIN_HEAP, 2 * len(self._deadlines))
