"""One job: a response, or scores, as the scheduler computes them."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

from adafuse_llm.backends.base import Query
from adafuse_llm.decoding.member import Ask, Member
from adafuse_llm.errors import RequestTimeoutError
from adafuse_llm.runtime.budget import Needs

Deliver = Callable[[Any], None]
"""A function that receives each event of a job, or the error that ended it."""


class Job:
    """One computation: its members, its memory needs and its progress.

    Args:
        members: one `Member` per active backend. Each member holds the encoded prompt.
        needs: maximum bytes that the job holds on each device.
        steps: the computation. It yields `Ask` objects, and events to deliver.
        cancelled: function that returns the last event if `cancel` is set, or raises an error.
        cancel: flag that the caller sets to end the job with its result so far.
        timeout: seconds after which the job fails, counted from its submission.

    Attributes:
        cancel: as above.
        deadline: time at which the job is late, in seconds of `time.monotonic`; None for no
            limit, or before `start_clock`.
        abandoned: whether the caller no longer waits for the result.
        unanswered: names of the members whose answers the job waits for, one per query.
        overtaken: number of later jobs that started while this one waited for memory.
    """

    def __init__(
        self,
        members: Sequence[Member],
        needs: Needs,
        steps: Generator[object, None, None],
        *,
        cancelled: Callable[[], object] | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
    ) -> None:
        self.members = tuple(members)
        self.needs = needs
        self.cancel = cancel
        self.deadline: float | None = None
        self.abandoned = False
        self.unanswered: list[str] = []
        self.overtaken = 0
        self._steps = steps
        self._cancelled = cancelled
        self._timeout = timeout
        self._end: Literal["abandoned", "cancelled", "late"] | BaseException | None = None

    def start_clock(self) -> None:
        """Start to count the seconds of `timeout`."""
        if self._timeout is not None:
            self.deadline = time.monotonic() + self._timeout

    def must_end(self) -> bool:
        """Return whether the job is abandoned, cancelled or late.

        It must also end if its `cancel` raises an exception. The next `resume` ends the job.
        """
        if self._end is None:
            try:
                if self.abandoned:
                    self._end = "abandoned"
                elif self.cancel is not None and self.cancel.is_set():
                    self._end = "cancelled"
                elif self.deadline is not None and time.monotonic() >= self.deadline:
                    self._end = "late"
            except BaseException as error:  # `cancel` is an object of the caller
                self._end = error
        return self._end is not None

    def resume(self, deliver: Deliver) -> tuple[tuple[Member, Query], ...]:
        """Run the computation until it needs answers to queries, and return these queries.

        The tuple is empty if the job has ended. In that case, the last event or the error has
        been delivered, unless the caller had abandoned the job.
        """
        try:
            if self.must_end():
                self._deliver_end(deliver)
                return ()
            for step in self._steps:
                if not isinstance(step, Ask):
                    deliver(step)
                elif step.queries:
                    self.unanswered = [member.name for member, _ in step.queries]
                    return step.queries
        except BaseException as error:  # an error in this job must not end the others
            deliver(error)
        return ()

    def close(self) -> None:
        """Close the computation."""
        self._steps.close()

    def _deliver_end(self, deliver: Deliver) -> None:
        if isinstance(self._end, BaseException):
            deliver(self._end)
        elif self._end == "cancelled":
            assert self._cancelled is not None, "a job with `cancel` needs `cancelled`"
            deliver(self._cancelled())
        elif self._end == "late":
            deliver(self._timeout_error())

    def _timeout_error(self) -> RequestTimeoutError:
        state = ""
        if inspect.getgeneratorstate(self._steps) == inspect.GEN_CREATED:
            state = " before it could start"
        elif names := ", ".join(map(repr, dict.fromkeys(self.unanswered))):
            state = f" while it waited for a forward pass of {names}"
        return RequestTimeoutError(
            f"the request was stopped after timeout={self._timeout:g} seconds{state}. Allow more "
            "seconds, shorten the prompt, or lower max_new_tokens."
        )
