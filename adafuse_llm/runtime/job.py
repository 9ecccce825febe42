"""One job: a response, or scores, as the scheduler computes them."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from adafuse_llm.decoding.member import Ask, MemberQuery, MemberState
from adafuse_llm.errors import RequestTimeoutError
from adafuse_llm.runtime.budget import Needs

Deliver = Callable[[Any], None]
"""A function that receives each event of a job, or the error that ended it. It must not block."""


@dataclass(eq=False)
class Job:
    """One computation: its members, its memory needs and its progress.

    Attributes:
        members: the state of every active backend.
        needs: maximum bytes that the job holds, by device.
        steps: the computation. It yields `Ask` objects, and events to deliver.
        cancelled: function that returns the last event of a cancelled job, or raises an error.
        cancel: flag that the caller sets to end the job with its result so far.
        timeout: seconds after which the job fails, counted from `begin`.
        deliver: receives the events, from `begin` on.
        abandoned: whether the caller no longer waits for the result.
        unanswered: the member of each query that has no answer yet.
    """

    members: Sequence[MemberState]
    needs: Needs
    steps: Generator[object, None, None]
    cancelled: Callable[[], object]
    cancel: threading.Event | None
    timeout: float | None
    deliver: Deliver = field(init=False)
    abandoned: bool = False
    unanswered: list[MemberState] = field(default_factory=list)
    _deadline: float | None = None  # in seconds of time.monotonic

    def begin(self, deliver: Deliver) -> None:
        """Deliver events from now on, and start to count the seconds of `timeout`."""
        self.deliver = deliver
        if self.timeout is not None:
            self._deadline = time.monotonic() + self.timeout

    def ends_early(self) -> bool:
        """Return whether the job is abandoned, cancelled or late.

        If it is cancelled or late, deliver its last event or an error.
        """
        try:
            if self.abandoned:
                return True
            if self.cancel is not None and self.cancel.is_set():
                self.deliver(self.cancelled())
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
            for step in self.steps:
                if not isinstance(step, Ask):
                    self.deliver(step)
                elif step.queries:
                    self.unanswered = [asked.member for asked in step.queries]
                    return step.queries
        except BaseException as error:  # an error in this job must not end the others
            self.deliver(error)
        return ()

    def _timeout_error(self) -> RequestTimeoutError:
        state = ""
        if inspect.getgeneratorstate(self.steps) == inspect.GEN_CREATED:
            state = " before it could start"
        elif waiting := dict.fromkeys(self.unanswered):
            names = ", ".join(repr(member.name) for member in waiting)
            state = f" while it waited for a forward pass of {names}"
        problems = [member.backend.problem for member in self.unanswered if member.backend.problem]
        remedy = ". Allow more seconds, shorten the prompt, or lower max_new_tokens."
        why = f": {problems[0]}" if problems else remedy
        return RequestTimeoutError(
            f"the request was stopped after timeout={self.timeout:g} seconds{state}{why}"
        )
