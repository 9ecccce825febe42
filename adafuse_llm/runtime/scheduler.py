"""The scheduler: runs jobs and batches the queries that they send to members.

A job is one response of a request, or the scores that a request asks for. Any thread can submit
jobs. One thread, the coordinator, runs the jobs' own code (rounds, tokenizers). When a lane is
free, the coordinator picks one of the lane's members. All queries that wait for this member are
evaluated in one call. A job resumes when all its queries are answered. Synchronous, asynchronous
and batched calls all use this one loop.

The coordinator never runs a model. So while a pass takes long, or hangs, it still ends jobs
that are cancelled or late, and it still serves the other lanes.

Choice of member: the scheduler picks the member with the most waiting queries, so that jobs
advance together and batches stay large. A query that has waited too long goes first
(`next_batch`).

Prompts: a member reads a long prompt in pieces (`Backend.read_piece`). After each piece, the query
waits again, so the end of its job comes between. While other jobs write, it lets `READ_PATIENCE` of
their evaluations go first, also those of other lanes on the device.

Choice of thread: each lane (`Backend.lane`) has its own thread, so only one
thread ever uses a model. Members on different devices run at the same time. GGUF members and
members on servers have a lane of their own each.

Transformers members on the same device share a lane and take turns, because they share the threads
of torch. If they ran at the same time, they would compete for all cores.

Choice of job: jobs start in the order of arrival, within the limits on their number
(`RuntimeConfig.max_requests`) and on memory (`RuntimeConfig.cache_bytes`). Jobs that fit into
memory may overtake one that does not. Once `RuntimeConfig.max_requests` jobs have overtaken it,
all later jobs wait until it has started. `RuntimeConfig.max_waiting` limits the queue.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from adafuse_llm.backends.base import Backend, Query
from adafuse_llm.backends.checks import check_results
from adafuse_llm.config import RuntimeConfig
from adafuse_llm.decoding.member import Member
from adafuse_llm.errors import (
    AdaFuseError,
    EngineClosedError,
    MemberUnavailableError,
    QueueFullError,
    as_member_error,
)
from adafuse_llm.forks import after_fork
from adafuse_llm.runtime.budget import CacheBudget, Needs
from adafuse_llm.runtime.job import Deliver, Job
from adafuse_llm.runtime.waiting import WaitingJobs

logger = logging.getLogger(__name__)

IDLE_SECONDS = 5.0
"""Seconds that the threads wait for another job before they end."""

EXIT_SECONDS = 30.0
"""Seconds that the interpreter waits at exit for a forward pass to finish."""

READ_PATIENCE = 4
"""Number of evaluations for which a prompt that is being read lets other queries go first. So most
rounds wait for one piece at most."""

POLL_SECONDS = 0.05
"""Maximum seconds after which the coordinator notices that a job is cancelled or late."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingQuery:
    """A query that waits for its lane.

    Attributes:
        job: the job that sent the query.
        member: the member that it asks.
        query: the query.
        since: number of evaluations that the lane had begun when the query arrived.
        is_reading: whether the member has read only a part of the prompt.
    """

    job: Job
    member: Member
    query: Query
    since: int
    is_reading: bool = False

    @property
    def backend(self) -> Backend:
        """The backend that answers the query."""
        return self.member.backend


def next_batch(
    waiting: Sequence[PendingQuery], begun: int, patience: int, *, may_read: bool
) -> list[PendingQuery]:
    """Return the queries to evaluate next: those to the backend with the most waiting queries.

    If several backends have equally many, the one with the oldest query is next. If the oldest
    query of all has waited for `patience` evaluations, its backend is next in any case.

    Args:
        waiting: the queries that wait for one lane, oldest first.
        begun: number of evaluations that the lane has begun.
        patience: number of evaluations for which a query may wait.
        may_read: whether queries whose prompts are being read may take part.
    """
    waiting = [each for each in waiting if may_read or not each.is_reading]
    if not waiting:
        return []
    backend = waiting[0].backend
    if begun - waiting[0].since < patience:
        names = [pending.backend.name for pending in waiting]
        ((name, _),) = Counter(names).most_common(1)
        backend = waiting[names.index(name)].backend
    return [pending for pending in waiting if pending.backend is backend]


Work = Callable[[], None]


class _Lane:
    """The queries that wait for one lane, and the thread that evaluates them.

    Args:
        name: the lane's name.

    Attributes:
        waiting: the queries that wait, oldest first.
        begun: number of evaluations that the lane has begun.
        batch: the queries that are being evaluated.
        beside: the lanes whose members are on the same device, with this one.
        passed: number of evaluations of other queries that these lanes have begun since this one
            read a piece of a prompt.
    """

    def __init__(self, name: str) -> None:
        self.waiting: list[PendingQuery] = []
        self.begun = 0
        self.batch: list[PendingQuery] = []
        self.beside: Sequence[_Lane] = [self]
        self.passed = 0
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"adafuse {name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def submit(self, work: Work) -> None:
        """Do work that uses the lane's members, after all work submitted before it."""
        self._queue.put(work)

    @property
    def evaluating(self) -> str | None:
        """Name of the member that is being evaluated; None if the lane is free."""
        return next((pending.backend.name for pending in self.batch), None)

    def may_read(self) -> bool:
        """Return whether the lane may read a piece of a prompt now.

        While as many jobs on the device write as read, `READ_PATIENCE` of their evaluations go
        first. While fewer write, one does, because passes for few jobs are less efficient.
        """
        pending = [each for lane in self.beside for each in (*lane.waiting, *lane.batch)]
        reading = {each.job for each in pending if each.is_reading}
        writing = {each.job for each in pending} - reading
        return not writing or self.passed >= (READ_PATIENCE if len(writing) >= len(reading) else 1)

    def next_batch(self, patience: int) -> list[PendingQuery]:
        """Remove the next batch from `waiting` and return it. It has queries to one backend."""
        may_read = self.may_read()
        self.batch = next_batch(self.waiting, self.begun, patience, may_read=may_read)
        taken = set(self.batch)
        self.waiting = [pending for pending in self.waiting if pending not in taken]
        self.begun += bool(self.batch)
        if not all(pending.is_reading for pending in self.batch):
            for lane in self.beside:
                lane.passed += 1
        return self.batch

    def stop(self) -> None:
        """End the thread after all submitted work."""
        self._queue.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # the work must not keep its job alive while the thread waits


Outcome = AdaFuseError | Literal["answered", "reading"]
"""Outcome of a query: an error, or whether it is answered or its prompt is still being read."""


@dataclass(frozen=True, slots=True)
class _BatchDone:
    """Message to the coordinator that a lane has evaluated a batch.

    Attributes:
        lane: the lane.
        batch: the queries of the batch.
        outcomes: the outcome of each query, or one exception if a defect in this module prevented
            the evaluation.
    """

    lane: _Lane
    batch: Sequence[PendingQuery]
    outcomes: Sequence[Outcome] | BaseException


@dataclass(frozen=True, slots=True)
class _Abandoned:
    """Message to the coordinator that nobody waits for some jobs any more."""

    jobs: Sequence[Job]


Submission = tuple[Job, Deliver]
Submissions = tuple[Submission, ...]
_Message = Submissions | _Abandoned | _BatchDone | None

_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all schedulers at exit. A thread that still runs a model would abort the process."""
    for scheduler in list(_running):
        scheduler.close(timeout=EXIT_SECONDS)


class Scheduler:
    """Scheduler that runs jobs on threads.

    The threads start with the first job and end when they are idle.

    Args:
        backends: all backends that jobs may query.
        runtime: options. The scheduler uses the maximum number of simultaneous jobs.
        budget: object that decides whether jobs fit into memory.
    """

    def __init__(
        self, backends: Sequence[Backend], runtime: RuntimeConfig, budget: CacheBudget
    ) -> None:
        self.lanes = {each.name: each.lane for each in backends}
        self.devices = {
            each.lane: each.name if each.is_remote else each.device for each in backends
        }
        self.runtime = runtime
        self.budget = budget
        self._closed = False
        after_fork(self._renew)
        _running.add(self)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._coordinator: _Coordinator | None = None

    @property
    def running(self) -> int:
        """Number of jobs that are running."""
        coordinator = self._coordinator
        return 0 if coordinator is None else coordinator.running

    @property
    def waiting(self) -> int:
        """Number of jobs that wait until they can start."""
        coordinator = self._coordinator
        return 0 if coordinator is None else coordinator.waiting

    @property
    def needs(self) -> Sequence[Needs]:
        """The needs of the jobs that are running."""
        coordinator = self._coordinator
        return () if coordinator is None else coordinator.needs

    @property
    def cache_use(self) -> dict[str, tuple[int, int]]:
        """Bytes that running jobs reserve on each device, and the device's limit."""
        return self.budget.use(self.needs)

    @property
    def closed(self) -> bool:
        """Whether the scheduler is closed and accepts no more jobs."""
        return self._closed

    def check_accepts(self) -> None:
        """Raise an error if `submit` would not accept a job now.

        Raises:
            EngineClosedError: the scheduler is closed.
            QueueFullError: too many jobs wait.
        """
        if self._closed:
            raise EngineClosedError("this engine is closed; create a new one")
        coordinator, limit = self._coordinator, self.runtime.max_waiting
        if coordinator is None or limit is None:
            return
        waiting = coordinator.unfinished - self.runtime.max_requests
        if waiting >= limit:
            raise QueueFullError(
                f"the engine is busy: {self.runtime.max_requests} requests run at most, and "
                f"{waiting} others wait already; RuntimeConfig(max_waiting={limit}) allows no more."
                " Try again later, or allow more."
            )

    def submit(self, *submissions: Submission) -> None:
        """Submit jobs. Jobs of one call enter the queue together.

        The coordinator calls each job's `Deliver` function with every event. The last event
        has the result. If an error ends the job, the last call passes the error instead.

        Raises:
            EngineClosedError: the scheduler is closed.
            QueueFullError: too many jobs wait.
        """
        with self._lock:
            self.check_accepts()
            for job, _ in submissions:
                job.start_clock()
            coordinator = self._coordinator
            if coordinator is None or not coordinator.try_submit(submissions):
                self._coordinator = _Coordinator(self, submissions)
                try:
                    self._coordinator.start()
                except BaseException:  # such as too many threads in the process
                    self._coordinator = None
                    raise

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End jobs whose results nobody wants any more. Jobs that have ended do not matter.

        Any thread can call this, and so can the garbage collector.
        """
        for job in jobs:
            job.abandoned = True
        if (coordinator := self._coordinator) is not None:
            coordinator.abandon(jobs)

    def forget(self, coordinator: _Coordinator) -> None:
        """Drop a coordinator whose thread ends.

        Without the cycle between the two, an engine that nobody uses needs no garbage collector to
        free its members.
        """
        with self._lock:
            if self._coordinator is coordinator:
                self._coordinator = None

    def close(self, timeout: float | None = None) -> tuple[str, ...]:
        """End all jobs with `EngineClosedError`, and wait for the threads to finish.

        Args:
            timeout: maximum seconds to wait.

        Returns:
            The names of the members that are still being evaluated when the time is over.
        """
        with self._lock:
            self._closed = True
            coordinator = self._coordinator
        return () if coordinator is None else coordinator.close(timeout)


class _Coordinator(threading.Thread):
    """The thread that runs jobs; it ends when it is idle or closed.

    Only this thread changes its jobs and lanes. Other threads send messages to the inbox:
    jobs to start, jobs that nobody waits for, evaluated batches, or None to close.

    The work between two messages does not depend on the number of jobs that wait.
    """

    def __init__(self, scheduler: Scheduler, first: Submissions) -> None:
        super().__init__(name="adafuse", daemon=True)
        self._scheduler = scheduler  # keep it alive until it is closed at exit
        self._accepting = threading.Lock()
        self._ended = False
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._inbox.put(first)
        self._unfinished = len(first)
        self._waiting = WaitingJobs()
        self._active: dict[Job, Deliver] = {}
        self._may_admit = False
        self._lanes: dict[str, _Lane] = {}

    @property
    def running(self) -> int:
        """Number of jobs that are running."""
        return len(self._active)

    @property
    def unfinished(self) -> int:
        """Number of submitted jobs that have not ended."""
        return self._unfinished

    @property
    def waiting(self) -> int:
        """Number of submitted jobs that have not started."""
        return max(0, self._unfinished - self.running)  # 0: a job may end in between

    @property
    def needs(self) -> list[Needs]:
        """What the running jobs need on each device."""
        return [job.needs for job in list(self._active)]

    def try_submit(self, submissions: Submissions) -> bool:
        """Submit jobs; return False if the thread is about to end or did not start."""
        with self._accepting:
            if self._ended or not self.is_alive():
                return False
            self._unfinished += len(submissions)
            self._inbox.put(submissions)
            return True

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End jobs whose results nobody wants any more."""
        self._inbox.put(_Abandoned(jobs))

    def close(self, timeout: float | None) -> tuple[str, ...]:
        """End all jobs, and wait up to `timeout` seconds for the threads to end.

        Returns:
            The names of the members that are still being evaluated.
        """
        self._inbox.put(None)
        if self is not threading.current_thread():
            self.join(timeout)
        lanes = list(self._lanes.values())
        return tuple(each.evaluating for each in lanes if each.evaluating and each.is_alive)

    def run(self) -> None:
        """Process messages, admit jobs and start evaluations until closed or idle."""
        try:
            for name in set(self._scheduler.lanes.values()):
                self._lanes[name] = _Lane(name)  # one by one, so that all are stopped below
            devices = self._scheduler.devices
            for name, lane in self._lanes.items():
                beside = [each for each in self._lanes if devices[each] == devices[name]]
                lane.beside = [self._lanes[each] for each in beside]
            while self._process_messages():
                self._end_stopped()
                self._admit()
                self._start_evaluations()
        except BaseException as error:  # a defect in this module must not block callers forever
            logger.exception("the scheduler failed")
            self._end_all(error)
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.join()
        self._scheduler.forget(self)

    def _process_messages(self) -> bool:
        """Wait for a message and process all pending ones. Return False to end the thread.

        The wait is short while there are jobs, because they can be cancelled without a message.
        """
        has_jobs = bool(self._active or self._waiting)
        try:
            message = self._inbox.get(timeout=POLL_SECONDS if has_jobs else IDLE_SECONDS)
        except queue.Empty:
            if has_jobs or any(lane.evaluating for lane in self._lanes.values()):
                return True  # a pass may still run for a job that has ended
            with self._accepting:
                self._ended = self._inbox.empty()
            return not self._ended
        while True:
            if message is None:
                self._end_all(EngineClosedError("this engine is closed"))
                return False
            if isinstance(message, _BatchDone):
                self._resume_answered(message)
            elif isinstance(message, _Abandoned):
                self._end_waiting(each for each in message.jobs if each in self._waiting)
            else:
                for job, deliver in message:
                    self._waiting.add(job, deliver)
                self._may_admit = True
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return True

    def _resume_answered(self, done: _BatchDone) -> None:
        """Resume jobs that have all answers, and end jobs with a failed query."""
        done.lane.batch = []
        if isinstance(done.outcomes, BaseException):
            raise done.outcomes
        for pending, outcome in zip(done.batch, done.outcomes, strict=True):
            job, lane = pending.job, done.lane
            if job not in self._active:  # the job ended during the evaluation
                continue
            if outcome == "reading":
                lane.waiting.append(replace(pending, since=lane.begun, is_reading=True))
                lane.passed = 0
                continue
            job.unanswered.remove(pending.member.name)
            if isinstance(outcome, AdaFuseError):
                self._finish(job, outcome)
            elif not job.unanswered:
                self._resume(job)

    def _end_stopped(self) -> None:
        """End jobs that are cancelled or late, both running and waiting ones."""
        for job in [job for job in self._active if job.must_end()]:
            self._resume(job)
        self._end_waiting(self._waiting.to_end())

    def _end_waiting(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.resume(self._waiting.remove(job))
            job.close()
            self._count_ended(1)

    def _admit(self) -> None:
        """Start waiting jobs, within the limits on their number and memory."""
        while self._may_admit:  # a job can end as soon as it starts, and make room
            self._may_admit = False
            for job in self._startable():
                self._active[job] = self._waiting.remove(job)
                self._resume(job)

    def _startable(self) -> list[Job]:
        """Return the waiting jobs that can start, in order of arrival.

        A job that does not fit into memory can be overtaken `RuntimeConfig.max_requests` times.
        """
        most, budget = self._scheduler.runtime.max_requests, self._scheduler.budget
        used = self.needs
        startable: list[Job] = []
        too_large: list[Job] = []
        for job in self._waiting:
            is_blocked = too_large and too_large[0].overtaken >= most  # the oldest, most often
            if is_blocked or len(used) >= most or len(too_large) >= most:
                break
            if not used or budget.fits([job.needs, *used]):  # a limit may fall while a job waits
                for each in too_large:
                    each.overtaken += 1
                startable.append(job)
                used.append(job.needs)
            else:
                too_large.append(job)
        return startable

    def _start_evaluations(self) -> None:
        """Start the evaluation of the next batch on every free lane."""
        patience = len(self._scheduler.lanes) + 1
        for lane in self._lanes.values():
            if not lane.batch and (batch := lane.next_batch(patience)):
                lane.submit(partial(self._run_batch, lane, batch))

    def _run_batch(self, lane: _Lane, batch: Sequence[PendingQuery]) -> None:
        """Evaluate a batch on the lane's thread, and send the outcome to the coordinator."""
        outcomes: Sequence[Outcome] | BaseException
        try:
            outcomes = _evaluate_batch(batch)
        except BaseException as error:  # a defect in this module; the coordinator reports it
            outcomes = error
        self._inbox.put(_BatchDone(lane, batch, outcomes))

    def _lane_of(self, member: Member) -> _Lane:
        return self._lanes[self._scheduler.lanes[member.name]]

    def _resume(self, job: Job) -> None:
        queries = job.resume(self._active[job])
        for member, query in queries:
            lane = self._lane_of(member)
            lane.waiting.append(PendingQuery(job, member, query, lane.begun))
        if not queries:
            self._finish(job)

    def _finish(self, job: Job, error: BaseException | None = None) -> None:
        """End a job and free its resources.

        Each lane frees the job's memory before it evaluates queries of later jobs.
        """
        deliver = self._active.pop(job)
        self._may_admit = True
        self._count_ended(1)
        job.close()
        for lane in self._lanes.values():
            lane.waiting = [p for p in lane.waiting if p.job is not job]
        for member in job.members:
            self._lane_of(member).submit(partial(_release, member))
        if error is not None:
            deliver(error)

    def _count_ended(self, jobs: int) -> None:
        with self._accepting:
            self._unfinished -= jobs

    def _end_all(self, error: BaseException) -> None:
        """End every job with an error, and accept no more jobs."""
        with self._accepting:
            self._ended = True
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, tuple):
                for job, deliver in message:
                    self._waiting.add(job, deliver)
        for job in list(self._active):
            self._finish(job, error)
        self._count_ended(len(self._waiting))
        for job in list(self._waiting):
            self._waiting.remove(job)(error)


def _release(member: Member) -> None:
    try:
        member.backend.release(member.tree)
    except BaseException:  # the job has ended, so its result must not change
        logger.exception("member %r failed to release a job", member.name)


def _evaluate_batch(batch: Sequence[PendingQuery]) -> list[Outcome]:
    """Read a piece of the prompts of queries to one member, and evaluate those that are read.

    If the evaluation of several queries fails, each query is evaluated alone, so that only the
    faulty queries fail. If a single query with drafts fails, it is evaluated again without the
    drafts. If the member is not available, all queries fail at once.
    """
    backend = batch[0].backend
    failure: BaseException | None = None
    is_read = [True] * len(batch)
    try:
        is_read = backend.read_piece([each.query.tree for each in batch])
        ready = [each for each, done in zip(batch, is_read, strict=True) if done]
        queries = [each.query for each in ready]
        results = check_results(backend.name, queries, backend.evaluate(queries)) if ready else []
        for each, result in zip(ready, results, strict=True):
            each.member.learn(each.query, result)
    except BaseException as error:  # some libraries raise BaseException; the thread must not end
        traceback.clear_frames(error.__traceback__)  # the frames keep tensors of the pass alive
        failure = error
    if failure is None:
        return ["answered" if done else "reading" for done in is_read]
    if isinstance(failure, MemberUnavailableError):
        return [failure] * len(batch)
    if len(batch) > 1:
        return [_evaluate_batch([each])[0] for each in batch]
    if (plain := batch[0].query.plain) is not None:
        return _evaluate_batch([replace(batch[0], query=plain)])
    return [as_member_error(backend.name, failure)]
