"""One job: a response, or scores, as the scheduler computes them."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from adafuse_llm.decoding.member import Ask, MemberQuery, MemberState
from adafuse_llm.errors import RequestTimeoutError
from adafuse_llm.runtime.budget import Needs

Deliver = Callable[[Any], None]
"""A function that receives each event of a job, or the error that ended it. It does not block."""


class Job:
    """One computation: its members, its memory needs and its progress.

    Args:
        members: the state of every active backend.
        needs: maximum bytes that the job holds, by device.
        steps: the computation. It yields `Ask` objects, and events to deliver.
        cancelled: function that returns the last event if `cancel` is set, or raises an error.
        cancel: flag that the caller sets to end the job with its result so far.
        timeout: seconds after which the job fails, counted from `begin`.

    Attributes:
        abandoned: whether the caller no longer waits for the result.
        unanswered: the members whose answers the job waits for, one per query.
    """

    deliver: Deliver

    def __init__(
        self,
        members: Sequence[MemberState],
        needs: Needs,
        steps: Generator[object, None, None],
        *,
        cancelled: Callable[[], object] | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
    ) -> None:
        self.members = tuple(members)
        self.needs = needs
        self.abandoned = False
        self.unanswered: list[MemberState] = []
        self._steps = steps
        self._cancelled = cancelled
        self._cancel = cancel
        self._timeout = timeout
        self._deadline: float | None = None  # in seconds of time.monotonic

    def begin(self, deliver: Deliver) -> None:
        """Deliver events from now on, and start to count the seconds of `timeout`."""
        self.deliver = deliver
        if self._timeout is not None:
            self._deadline = time.monotonic() + self._timeout

    def ends_early(self) -> bool:
        """Return whether the job is abandoned, cancelled or late, and deliver its last event."""
        try:
            if self.abandoned:
                return True
            if self._cancel is not None and self._cancel.is_set():
                assert self._cancelled is not None, "a job with `cancel` needs `cancelled`"
                self.deliver(self._cancelled())
                return True
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise self._timeout_error()
        except BaseException as error:  # `cancel` is an object of the caller, and can raise any
            self.deliver(error)
            return True
        return False

    def resume(self) -> tuple[MemberQuery, ...]:
        """Run the computation up to its next queries, and return them; none if it has ended."""
        try:
            for step in self._steps:
                if not isinstance(step, Ask):
                    self.deliver(step)
                elif step.queries:
                    self.unanswered = [asked.member for asked in step.queries]
                    return step.queries
        except BaseException as error:  # an error in this job must not end the others
            self.deliver(error)
        return ()

    def close(self) -> None:
        """Close the computation."""
        self._steps.close()

    def _timeout_error(self) -> RequestTimeoutError:
        state = ""
        if inspect.getgeneratorstate(self._steps) == inspect.GEN_CREATED:
            state = " before it could start"
        elif waiting := dict.fromkeys(self.unanswered):
            names = ", ".join(repr(member.name) for member in waiting)
            state = f" while it waited for a forward pass of {names}"
        remedy = ". Allow more seconds, shorten the prompt, or lower max_new_tokens."
        problem = next(
            (member.backend.problem for member in self.unanswered if member.backend.problem), ""
        )
        return RequestTimeoutError(
            f"the request was stopped after timeout={self._timeout:g} seconds{state}"
            + (f": {problem}" if problem else remedy)
        )
