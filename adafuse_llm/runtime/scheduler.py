"""The driver: who evaluates what running requests ask for, and when.

Requests arrive from any thread. One coordinating thread runs what is theirs (rounds, tokenizers);
whenever a device is free, it takes one of the device's members and has everything evaluated that
is asked of it, in one call. A request goes on once all it asked for is answered. Synchronous,
asynchronous and batched callers are all clients of this one loop.

Which member: the one that most requests wait for, so that requests fall into step and batches
stay large, unless somebody has waited too long (`next_backend`).

Which thread: members on different devices (`SupportsPlacement.device`) run at the same time, each
device on a thread of its own, so only one thread ever touches a model. Members of one device take
turns, and where there is only one device the coordinating thread evaluates, without hand-offs. This
is so on a CPU as well. At the same time, members with all cores each fight for them; with a share
of the cores each they gain little where a pass keeps all cores busy, wait for the slowest, and need
another number of torch threads, which is the caller's to set
(``benchmarks/members_side_by_side.py`` measures it).

Which requests: first come first served, as far as places (`RuntimeConfig.max_requests`) and memory
(`RuntimeConfig.cache_bytes`) go. Whoever does not fit waits, and all behind it.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from adafuse_llm.backends.base import Backend, SupportsPlacement
from adafuse_llm.config import RuntimeConfig
from adafuse_llm.decoding.member import Member, MemberQuery
from adafuse_llm.errors import (
    AdaFuseError,
    EngineClosedError,
    MemberError,
    MemberOutOfMemoryError,
    is_out_of_memory,
)
from adafuse_llm.forks import after_fork
from adafuse_llm.runtime.budget import CacheBudget, Needs

logger = logging.getLogger(__name__)

IDLE_SECONDS = 5.0
"""How long the threads wait for another request before they end."""

EXIT_SECONDS = 30.0
"""How long the interpreter waits at exit for a forward pass to finish."""

Outbox = Callable[[Any], None]
"""Called with each event of a request, or with the error that ended it."""


class Request:
    """One computation: its members, its progress, and where its events go.

    Args:
        members: one `Member` per backend, holding the encoded prompt.
        needs: most bytes that it holds on each device.
        steps: the computation: yields what it asks (tuples), and events to deliver.
        cancelled: makes the event that ends it where `cancel` was set.
        cancel: set by the caller to end it with what it has.

    Attributes:
        abandoned: set when nobody waits for the result any more.
        unanswered: how many of its questions wait for an answer.
    """

    def __init__(
        self,
        members: Sequence[Member],
        needs: Needs,
        steps: Generator[object, None, None],
        *,
        cancelled: Callable[[], object] | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        self.members = tuple(members)
        self.needs = needs
        self.cancel = cancel
        self.abandoned = threading.Event()
        self.unanswered = 0
        self._steps = steps
        self._cancelled = cancelled

    @property
    def is_over(self) -> bool:
        """Whether the caller wants no more."""
        return self.abandoned.is_set() or (self.cancel is not None and self.cancel.is_set())

    def resume(self, deliver: Outbox) -> tuple[MemberQuery, ...]:
        """Run to the next questions. Returns none once the request is over; its last event or
        its error has then been delivered.
        """
        try:
            if self.abandoned.is_set():
                return ()
            if self.is_over:
                assert self._cancelled is not None, "it has nothing to end with"
                deliver(self._cancelled())
                return ()
            for step in self._steps:
                if not isinstance(step, tuple):
                    deliver(step)
                elif step:
                    self.unanswered = len(step)
                    return step
        except BaseException as error:  # whatever broke this request must not break the others
            deliver(error)
        return ()

    def close(self) -> None:
        """End the computation where it stands."""
        self._steps.close()


@dataclass(frozen=True, slots=True, eq=False)
class PendingQuery:
    """A question that waits for its device.

    Attributes:
        since: how many evaluations the device had begun when it was asked.
    """

    request: Request
    query: MemberQuery
    since: int

    @property
    def backend(self) -> Backend:
        """Who is asked."""
        return self.query.member.backend


def next_backend(waiting: Sequence[PendingQuery], begun: int, patience: int) -> Backend:
    """The backend to evaluate next: the one that most questions wait for; of equal ones the one
    whose oldest question waits longest. A question that has been passed over `patience` times
    comes before all that.

    Args:
        waiting: questions for one device, at least one, oldest first.
        begun: evaluations that the device has begun so far.
        patience: how many evaluations a question may see go by.
    """
    oldest = waiting[0]
    if begun - oldest.since >= patience:
        return oldest.backend
    backends = {each.backend.name: each.backend for each in waiting}
    ((name, _),) = Counter(each.backend.name for each in waiting).most_common(1)
    return backends[name]


Job = Callable[[], None]


class _Device:
    """What waits for one device, and the thread that does it.

    Args:
        name: the device.
        threaded: whether it has a thread of its own; if not, jobs are done where they are given.

    Attributes:
        waiting: questions, oldest first.
        begun: evaluations begun so far.
        busy: whether an evaluation runs.
    """

    def __init__(self, name: str, *, threaded: bool) -> None:
        self.waiting: list[PendingQuery] = []
        self.begun = 0
        self.busy = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._work, name=f"adafuse {name}", daemon=True)
            self._thread.start()

    def do(self, job: Job) -> None:
        """Have something done that touches the device's members, after all that was given."""
        if self._thread is None:
            job()
        else:
            self._jobs.put(job)

    def take(self, patience: int) -> list[PendingQuery]:
        """The questions to evaluate next, all to one backend; they wait no longer."""
        backend = next_backend(self.waiting, self.begun, patience)
        group = [each for each in self.waiting if each.backend is backend]
        self.waiting = [each for each in self.waiting if each.backend is not backend]
        self.begun += 1
        self.busy = True
        return group

    def stop(self) -> None:
        """End the thread once it has done what it was given."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds a request


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """A device has answered: an error or None for each question, or the defect that kept it
    from answering.
    """

    device: _Device
    group: Sequence[PendingQuery]
    errors: Sequence[AdaFuseError | None] | BaseException


Arrival = tuple[Request, Outbox]
Arrivals = tuple[Arrival, ...]

_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is still inside a model when the interpreter goes away aborts the process."""
    for scheduler in list(_running):
        scheduler.close(timeout=EXIT_SECONDS)


class Scheduler:
    """Runs requests on threads that start with the first and end when idle.

    Args:
        backends: all that requests may ask.
        runtime: how many requests run at once.
        budget: whether they fit.
    """

    def __init__(
        self, backends: Sequence[Backend], runtime: RuntimeConfig, budget: CacheBudget
    ) -> None:
        self.devices = {
            each.name: each.device if isinstance(each, SupportsPlacement) else "unknown"
            for each in backends
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
        """Requests that are being decoded."""
        coordinator = self._coordinator
        return 0 if coordinator is None else coordinator.running

    @property
    def closed(self) -> bool:
        """Whether no more requests are taken."""
        return self._closed

    def submit(self, *arrivals: Arrival) -> None:
        """Start requests, those given together at the same time. Each one's outbox is called on
        the coordinating thread with each event, the last of which carries the generation, or with
        the error that ended the request.

        Raises:
            EngineClosedError: the scheduler was closed.
        """
        with self._lock:
            if self._closed:
                raise EngineClosedError("this engine was closed; make a new one")
            coordinator = self._coordinator
            if coordinator is None or not coordinator.accepts(arrivals):
                self._coordinator = _Coordinator(self, arrivals)
                self._coordinator.start()

    def close(self, timeout: float | None = None) -> None:
        """End running requests with `EngineClosedError` and wait for the threads to finish.

        Args:
            timeout: seconds to wait at most.
        """
        with self._lock:
            self._closed = True
            coordinator = self._coordinator
        if coordinator is not None:
            coordinator.close(timeout)


class _Coordinator(threading.Thread):
    """The thread that runs requests, from the first one until there are none.

    All state but the inbox is its own: other threads only send it messages.
    """

    def __init__(self, scheduler: Scheduler, first: Arrivals) -> None:
        super().__init__(name="adafuse", daemon=True)
        self._scheduler = scheduler  # kept alive, so that it is closed when the interpreter exits
        self._accepting = threading.Lock()
        self._ended = False
        self._inbox: queue.SimpleQueue[Arrivals | _Evaluated | None] = queue.SimpleQueue()
        self._inbox.put(first)
        self._queue: deque[Arrival] = deque()
        self._active: dict[Request, Outbox] = {}
        self._devices: dict[str, _Device] = {}

    @property
    def running(self) -> int:
        """Requests that are being decoded."""
        return len(self._active)

    def accepts(self, arrivals: Arrivals) -> bool:
        """Take in requests, unless the thread is about to end or could not start."""
        with self._accepting:
            if self._ended or not self.is_alive():
                return False
            self._inbox.put(arrivals)
            return True

    def close(self, timeout: float | None) -> None:
        """End running requests and wait for the thread, `timeout` seconds at most."""
        self._inbox.put(None)
        if self is not threading.current_thread():
            self.join(timeout)

    def run(self) -> None:
        """Listen, admit, evaluate, until closed or idle."""
        try:
            names = set(self._scheduler.devices.values())
            self._devices = {name: _Device(name, threaded=len(names) > 1) for name in names}
            while self._listen():
                self._end_cancelled()
                self._admit()
                self._evaluate()
        except BaseException as error:  # a defect of this module; nobody may wait forever
            logger.exception("the scheduler failed")
            self._end_all(error)
        for device in self._devices.values():
            device.stop()

    def _listen(self) -> bool:
        """Take in what has happened, waiting for something if nothing has; False to end."""
        try:
            message = self._inbox.get(timeout=None if self._active else IDLE_SECONDS)
        except queue.Empty:
            with self._accepting:
                self._ended = self._inbox.empty()
            return not self._ended
        while True:
            if message is None:
                self._end_all(EngineClosedError("this engine was closed"))
                return False
            if isinstance(message, _Evaluated):
                self._take_in(message)
            else:
                self._queue.extend(message)
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return True

    def _take_in(self, evaluated: _Evaluated) -> None:
        """Let requests go on whose last question was answered."""
        evaluated.device.busy = False
        if isinstance(evaluated.errors, BaseException):
            raise evaluated.errors
        for waiting, error in zip(evaluated.group, evaluated.errors, strict=True):
            request = waiting.request
            request.unanswered -= 1
            if request not in self._active:  # it ended while it was evaluated
                continue
            if error is not None:
                self._finish(request, error)
            elif not request.unanswered:
                self._resume(request)

    def _end_cancelled(self) -> None:
        """End requests whose callers want no more, whether they run or still wait."""
        for request in [each for each in self._active if each.is_over]:
            self._resume(request)
        over = [arrival for arrival in self._queue if arrival[0].is_over]
        for request, deliver in over:
            self._queue.remove((request, deliver))
            request.resume(deliver)

    def _admit(self) -> None:
        """Start requests, first come first served, as places and memory go."""
        runtime, budget = self._scheduler.runtime, self._scheduler.budget
        while self._queue and len(self._active) < runtime.max_requests:
            request, deliver = self._queue[0]
            if not budget.fits([request.needs, *(each.needs for each in self._active)]):
                return
            self._queue.popleft()
            self._active[request] = deliver
            self._resume(request)

    def _evaluate(self) -> None:
        """Give every device that is free the largest batch that waits for it."""
        patience = len(self._scheduler.devices) + 1
        for device in self._devices.values():
            if device.waiting and not device.busy:
                device.do(partial(self._run_batch, device, device.take(patience)))

    def _run_batch(self, device: _Device, group: Sequence[PendingQuery]) -> None:
        """Evaluate a batch; runs on the device's thread."""
        errors: Sequence[AdaFuseError | None] | BaseException
        try:
            errors = _evaluate_batch(group[0].backend, [each.query for each in group])
        except BaseException as error:  # a defect of this module, for the coordinator to report
            errors = error
        self._inbox.put(_Evaluated(device, group, errors))

    def _device(self, member: Member) -> _Device:
        return self._devices[self._scheduler.devices[member.name]]

    def _resume(self, request: Request) -> None:
        questions = request.resume(self._active[request])
        for query in questions:
            device = self._device(query.member)
            device.waiting.append(PendingQuery(request, query, device.begun))
        if not questions:
            self._finish(request)

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        """Free what is held for a request. Its memory on a device is free before the device
        evaluates anything that is admitted from now on.
        """
        deliver = self._active.pop(request)
        request.close()
        for device in self._devices.values():
            device.waiting = [each for each in device.waiting if each.request is not request]
        for member in request.members:
            self._device(member).do(partial(_release, member))
        if error is not None:
            deliver(error)

    def _end_all(self, error: BaseException) -> None:
        """End every request with an error, and take no more."""
        with self._accepting:
            self._ended = True
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, tuple):
                self._queue.extend(message)
        for request in list(self._active):
            self._finish(request, error)
        for _, deliver in self._queue:
            deliver(error)


def _release(member: Member) -> None:
    try:
        member.backend.release(member.tree)
    except BaseException:  # the request is over; its result must not depend on this
        logger.exception("member %r failed to release a request", member.name)


def _evaluate_batch(backend: Backend, queries: Sequence[MemberQuery]) -> list[AdaFuseError | None]:
    """Have a backend evaluate queries; return an error or None for each.

    If a shared evaluation fails, each query is evaluated alone, so that only those at fault fail.
    A query that fails alone is tried without its drafts, and its member drafts no more.
    """
    failure: BaseException | None = None
    try:
        started = time.perf_counter()
        results = backend.evaluate([each.query for each in queries])
        seconds = (time.perf_counter() - started) / len(queries)
        for each, result in zip(queries, results, strict=True):
            each.member.learn(each.query, result, seconds)
    except BaseException as error:  # libraries raise these too; the thread is ours
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the pass
        failure = error
    if failure is None:
        return [None] * len(queries)
    if len(queries) > 1:
        return [_evaluate_batch(backend, [each])[0] for each in queries]
    if queries[0].drafts:
        queries[0].member.stop_drafting()
        return _evaluate_batch(backend, [queries[0].without_drafts()])
    return [_member_error(backend.name, failure)]


def _member_error(name: str, error: BaseException) -> AdaFuseError:
    if isinstance(error, AdaFuseError):
        return error
    reason = f"{type(error).__name__}: {error}"
    wrapped = MemberError(name, reason)
    if is_out_of_memory(error):
        wrapped = MemberOutOfMemoryError(
            name,
            f"out of memory ({reason}). Use a shorter prompt, fewer requests at once, "
            "a smaller dtype or another device",
        )
    wrapped.__cause__ = error
    return wrapped
