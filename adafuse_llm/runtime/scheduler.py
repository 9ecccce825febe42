"""The scheduler: runs jobs and batches the queries that they send to members.

A job is one response of a request, or the scores that a request asks for. One thread, the
coordinator, runs the jobs' own code (rounds, tokenizers). A job resumes when its members have
answered all its queries.

Jobs start in the order of arrival, within the limits of `RuntimeConfig`. None overtakes another, so
all later jobs wait behind one that needs much memory.

Each lane (`Backend.lane`) has its own thread, so only one thread ever uses a model. Transformers
members on the same device share a lane, because they share the threads of torch. A lane that is
free evaluates the oldest query that waits for it, together with all others that wait for the same
member. So jobs that are out of step soon share passes.

A member reads a long prompt in pieces (`Backend.read_piece`). Before each further piece,
`READ_PATIENCE` evaluations for jobs that already write go first. Evaluations of other members on
the same device count, too.

The coordinator never runs a model. So it still ends jobs that are cancelled or late, and serves the
other lanes, while a pass takes long or hangs.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.checks import check_results
from adafuse_llm.config import RuntimeConfig
from adafuse_llm.decoding.member import MemberQuery, MemberState
from adafuse_llm.errors import (
    AdaFuseError,
    EngineClosedError,
    MemberUnavailableError,
    QueueFullError,
    as_member_error,
)
from adafuse_llm.runtime.budget import CacheBudget, Needs
from adafuse_llm.runtime.job import Job

logger = logging.getLogger(__name__)

EXIT_SECONDS = 30.0
"""Maximum seconds that the interpreter waits at exit for a forward pass to finish."""

READ_PATIENCE = 4
"""Number of evaluations for other requests between two pieces of a prompt. So most rounds wait for
at most one piece."""

LOOK_SECONDS = 0.1
"""Maximum seconds until the coordinator notices that a job is cancelled or late. A look at
8,000 waiting jobs takes 4 ms."""

Work = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class PendingQuery:
    """A job's query that waits until the lane of its member evaluates it."""

    job: Job
    asked: MemberQuery
    is_reading: bool = False  # whether the member has read only a part of the prompt


class _Lane(threading.Thread):
    """The queries that wait for one lane, oldest first, and the thread that evaluates them.

    Attributes:
        beside: the lanes that compute on the same device, including this one.
        batch: the queries that are being evaluated.
        passes: number of evaluations in the lanes `beside` since this lane read a piece of a
            prompt. Evaluations that only read on in prompts do not count.
        work: what the thread does, in order. None ends the thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=f"adafuse {name}", daemon=True)
        self.beside: Sequence[_Lane] = [self]
        self.waiting: list[PendingQuery] = []
        self.batch: list[PendingQuery] = []
        self.passes = 0
        self.work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()

    def next_batch(self) -> list[PendingQuery]:
        """Take the oldest query that is ready, and all other ready ones for the same member."""
        # a further piece of a prompt waits for `READ_PATIENCE` evaluations of jobs that write
        pending = [query for lane in self.beside for query in (*lane.waiting, *lane.batch)]
        reading = {query.job for query in pending if query.is_reading}
        may_read = self.passes >= READ_PATIENCE or all(query.job in reading for query in pending)
        ready = [query for query in self.waiting if may_read or not query.is_reading]
        first = ready[0].asked.member.name if ready else ""
        self.batch = [query for query in ready if query.asked.member.name == first]
        taken = set(self.batch)
        self.waiting = [query for query in self.waiting if query not in taken]
        if not all(query.is_reading for query in self.batch):
            for lane in self.beside:
                lane.passes += 1
        return self.batch

    def run(self) -> None:
        while (work := self.work.get()) is not None:
            work()
            del work  # the work must not keep its job alive while the thread waits


_started: weakref.WeakSet[_Coordinator] = weakref.WeakSet()


def _end_all_threads() -> None:
    # if a thread is still inside a model's library when the interpreter ends, the process aborts
    running = [coordinator for coordinator in list(_started) if coordinator.is_alive()]
    for coordinator in running:
        coordinator.stop()
    for coordinator in running:
        coordinator.join(EXIT_SECONDS)


class Scheduler:
    """Runs jobs. Its threads end when the scheduler is closed, or nothing refers to it any more.

    Attributes:
        work: by member, how many passes the ended jobs took, and how many tokens these passes read.
    """

    def __init__(self, backends: Sequence[Backend], runtime: RuntimeConfig) -> None:
        self.work = dict.fromkeys((backend.name for backend in backends), (0, 0))
        self.closed = False
        self._runtime = runtime
        self._budget = CacheBudget(runtime.cache_bytes)
        self._lock = threading.Lock()
        lanes = {backend.name: backend.lane for backend in backends}
        devices = {backend.lane: backend.device for backend in backends}
        self._new_coordinator = partial(
            _Coordinator, lanes, devices, runtime.max_requests, self._budget, self.work
        )
        self._coordinator = self._new_coordinator()

    @property
    def running(self) -> int:
        """Number of jobs that are running."""
        return len(self._coordinator.running)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait until they can start."""
        return max(0, len(self._coordinator.unfinished) - self.running)  # one may end in between

    def cache_needs(
        self, members: Sequence[MemberState], limit: int, spare: int, least: int | None = None
    ) -> tuple[Needs, int]:
        """Return `CacheBudget.needs`, given the needs of the running jobs."""
        return self._budget.needs(members, limit, spare, self._coordinator.needs, least)

    @property
    def cache_use(self) -> dict[str, tuple[int, int]]:
        """By device, the bytes that running jobs reserve there, and the device's limit."""
        return self._budget.use(self._coordinator.needs)

    def check_accepts(self) -> None:
        """Raise an EngineClosedError or a QueueFullError if the scheduler accepts no jobs now."""
        if self.closed:
            raise EngineClosedError("this engine is closed; create a new one")
        limit, most = self._runtime.max_waiting, self._runtime.max_requests
        waiting = len(self._coordinator.unfinished) - most
        if limit is not None and waiting >= limit:
            raise QueueFullError(
                f"the engine is busy: {most} requests run at most, and "
                f"{waiting} others wait already; RuntimeConfig(max_waiting={limit}) allows no more."
                " Try again later, or allow more."
            )

    def submit(self, jobs: Sequence[Job], deliver: Callable[[int, Any], None]) -> None:
        """Begin jobs, and put them into the queue together. Errors are as in `check_accepts`.

        `deliver` receives the index of a job with each of its events.
        """
        for index, job in enumerate(jobs):
            job.begin(partial(deliver, index))
        with self._lock:
            self.check_accepts()
            # use a new coordinator: a thread cannot start twice, and a forked child has no threads
            if not self._coordinator.is_alive():
                self._coordinator = self._new_coordinator()
                self._coordinator.start()
                weakref.finalize(self, self._coordinator.stop).atexit = False
            self._coordinator.submit(jobs)

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End jobs whose results nobody wants any more. The garbage collector can call this."""
        for job in jobs:
            job.abandoned = True

    def close(self, timeout: float | None = None) -> tuple[str, ...]:
        """End all jobs, wait up to `timeout` seconds, and return the members that still compute."""
        with self._lock:
            self.closed = True
        if self._coordinator.is_alive():
            self._coordinator.stop()
            self._coordinator.join(timeout)
        return self._coordinator.evaluated


class _Coordinator(threading.Thread):
    """The thread that runs jobs: at most `most` at a time, as far as they fit the `budget`.

    Only this thread changes its jobs and lanes. Other threads put work for it into `inbox`, and new
    jobs into `unfinished`. The coordinator has no reference to its scheduler, so an engine that
    nobody uses is freed with its members.
    """

    def __init__(
        self,
        lanes: Mapping[str, str],
        devices: Mapping[str, str],
        most: int,
        budget: CacheBudget,
        work: dict[str, tuple[int, int]],
    ) -> None:
        super().__init__(name="adafuse", daemon=True)
        self._lanes = {name: _Lane(name) for name in dict.fromkeys(lanes.values())}
        for name, lane in self._lanes.items():
            beside = [other for other, device in devices.items() if device == devices[name]]
            lane.beside = [self._lanes[other] for other in beside]
        self._lane_of = {member: self._lanes[name] for member, name in lanes.items()}
        self._most = most
        self._budget = budget
        self._work = work
        self.inbox: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._waiting: dict[Job, None] = {}  # in order of arrival
        self.running: dict[Job, None] = {}
        self.unfinished: set[Job] = set()
        self._next_look = 0.0
        self._is_closed = False

    @property
    def needs(self) -> list[Needs]:
        return [job.needs for job in list(self.running)]

    @property
    def evaluated(self) -> tuple[str, ...]:
        batches = [lane.batch for lane in self._lanes.values() if lane.is_alive()]
        return tuple(batch[0].asked.member.name for batch in batches if batch)

    def start(self) -> None:
        try:
            for lane in self._lanes.values():
                lane.start()
            super().start()
        except BaseException:  # such as too many threads
            self._end_lanes()
            raise
        _started.add(self)
        atexit.unregister(_end_all_threads)
        # register as the last function, which Python runs first: before libraries free their models
        atexit.register(_end_all_threads)

    def submit(self, jobs: Sequence[Job]) -> None:
        self.unfinished.update(jobs)
        self.inbox.put(lambda: self._waiting.update(dict.fromkeys(jobs)))

    def stop(self) -> None:
        self.inbox.put(self._close)

    def run(self) -> None:
        while not self._is_closed:
            try:
                # do the work in the inbox, and end jobs that are cancelled or late
                self._empty_inbox()
                self._end_stopped(list(self.running))
                if (now := time.monotonic()) >= self._next_look:
                    self._end_stopped(list(self._waiting))
                    self._next_look = now + LOOK_SECONDS
                # start jobs, and give work to lanes that are free
                self._admit()
                for lane in self._lanes.values():
                    if not lane.batch and lane.waiting and lane.next_batch():
                        lane.work.put(partial(self._evaluate, lane, lane.batch))
            except BaseException as error:  # a defect in this module must not block callers forever
                logger.exception("the scheduler failed")
                self._end_all(error)
        self._end_lanes()

    def _close(self) -> None:
        self._is_closed = True
        self._end_all(EngineClosedError("this engine is closed"))

    def _end_lanes(self) -> None:
        alive = [lane for lane in self._lanes.values() if lane.is_alive()]
        for lane in alive:
            lane.work.put(None)
        for lane in alive:
            lane.join()

    def _empty_inbox(self) -> None:
        # wait only briefly while there are jobs, because they can be cancelled
        timeout = LOOK_SECONDS if self.unfinished else None
        try:
            work = self.inbox.get(timeout=timeout)
            while True:
                work()
                work = self.inbox.get_nowait()
        except queue.Empty:
            return

    def _end_stopped(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.ends_early():
                self._end(job)

    def _admit(self) -> None:
        # start jobs in order while they fit beside those of other engines; one may always run
        while self._waiting and len(self.running) < self._most:
            job = next(iter(self._waiting))
            others = [other for other in list(_started) if other is not self]
            elsewhere = [needs for other in others for needs in other.needs]
            if self.running and not self._budget.fits([job.needs, *self.needs], elsewhere):
                return
            del self._waiting[job]
            self.running[job] = None
            self._resume(job)

    def _evaluate(self, lane: _Lane, batch: Sequence[PendingQuery]) -> None:
        # runs on the lane's thread
        outcomes: Sequence[Outcome] | BaseException
        try:
            outcomes = _evaluate_batch(batch)
        except BaseException as error:  # a defect in this module
            outcomes = error
        self.inbox.put(partial(self._resume_answered, lane, batch, outcomes))

    def _resume_answered(
        self,
        lane: _Lane,
        batch: Sequence[PendingQuery],
        outcomes: Sequence[Outcome] | BaseException,
    ) -> None:
        lane.batch = []
        if isinstance(outcomes, BaseException):
            raise outcomes
        for pending, outcome in zip(batch, outcomes, strict=True):
            job = pending.job
            if job not in self.running:  # the job ended during the evaluation
                continue
            # the rest of a prompt waits again, behind other queries
            if outcome == "reading":
                lane.waiting.append(replace(pending, is_reading=True))
                lane.passes = 0
                continue
            # a job goes on once all its queries are answered
            job.unanswered.remove(pending.asked.member)
            if isinstance(outcome, AdaFuseError):
                self._end(job, outcome)
            elif not job.unanswered:
                self._resume(job)

    def _resume(self, job: Job) -> None:
        queries = () if job.ends_early() else job.resume()
        for asked in queries:
            self._lane_of[asked.member.name].waiting.append(PendingQuery(job, asked))
        if not queries:
            self._end(job)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        self.running.pop(job, None)
        self._waiting.pop(job, None)
        self.unfinished.discard(job)
        job.steps.close()
        for lane in self._lanes.values():
            lane.waiting = [query for query in lane.waiting if query.job is not job]
        # every lane frees the job's memory before it evaluates queries of later jobs
        for member in job.members:
            self._lane_of[member.name].work.put(partial(_release, member, self._work))
        if error is not None:
            job.deliver(error)

    def _end_all(self, error: BaseException) -> None:
        for job in [*self.running, *self._waiting]:
            self._end(job, error)


def _release(member: MemberState, work: dict[str, tuple[int, int]]) -> None:
    passes, tokens = work[member.name]  # only this lane's thread changes them
    work[member.name] = (passes + member.passes, tokens + member.tokens)
    try:
        member.backend.release(member.tree)
    except BaseException:  # the job has ended, so its result must not change
        logger.exception("member %r failed to release a job", member.name)


Outcome = AdaFuseError | Literal["answered", "reading"]
"""Outcome of a query: an error, or whether it is answered or its prompt is still being read."""


def _evaluate_batch(batch: Sequence[PendingQuery]) -> list[Outcome]:
    # read a piece of each prompt, and evaluate the queries whose prompts are now read completely
    backend = batch[0].asked.member.backend
    failure: BaseException
    try:
        is_read = backend.read_piece([pending.asked.query.tree for pending in batch])
        ready = [pending for pending, done in zip(batch, is_read, strict=True) if done]
        queries = [pending.asked.query for pending in ready]
        results = check_results(backend.name, queries, backend.evaluate(queries)) if ready else []
        for pending, result in zip(ready, results, strict=True):
            pending.asked.member.learn(pending.asked.query, result)
        return ["answered" if done else "reading" for done in is_read]
    except BaseException as error:  # some libraries raise BaseException; the thread must not end
        traceback.clear_frames(error.__traceback__)  # the frames keep tensors of the pass alive
        failure = error
    if isinstance(failure, MemberUnavailableError):
        return [failure] * len(batch)
    # try every query alone, so that only the faulty ones fail
    if len(batch) > 1:
        return [_evaluate_batch([pending])[0] for pending in batch]
    # try the query without its drafts, which may be to blame
    asked = batch[0].asked
    if asked.without_drafts is not None:
        undrafted = MemberQuery(asked.member, asked.without_drafts)
        return _evaluate_batch([replace(batch[0], asked=undrafted)])
    return [as_member_error(backend.name, failure)]
