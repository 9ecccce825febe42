"""The driver: one thread that evaluates what running requests ask for.

Requests arrive from any thread. The worker looks at what every active request waits for, takes
one member and evaluates everything that is asked of it in one call; then each request goes on
until its next question. Synchronous, asynchronous and batched callers are all clients of this one
loop, so models are only ever touched by one thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import AdaFuseConfig, RuntimeConfig
from adafuse_llm.decoding.draft import Drafting
from adafuse_llm.decoding.member import Asking, Member
from adafuse_llm.decoding.rounds import decode, summarise
from adafuse_llm.errors import (
    AdaFuseError,
    EngineClosedError,
    MemberError,
    MemberOutOfMemoryError,
)
from adafuse_llm.results import Round, StreamEvent
from adafuse_llm.text.stops import Transcript

logger = logging.getLogger(__name__)

IDLE_SECONDS = 5.0
"""How long the worker thread waits for another request before it ends."""

EXIT_SECONDS = 30.0
"""How long the interpreter waits at exit for a forward pass to finish."""

Outbox = Callable[["StreamEvent | BaseException"], None]


class Request:
    """One decode: its members, its progress, and where its events go.

    Args:
        members: one `Member` per backend, holding the encoded prompt.
        config: validated options.
        drafts: what is evaluated early.
        transcript: the empty response.
        cancel: set by the caller to end the decode with what it has.

    Attributes:
        abandoned: set when nobody waits for the result any more.
        asking: what it waits for; it goes on when this is empty.
    """

    def __init__(
        self,
        members: Sequence[Member],
        config: AdaFuseConfig,
        drafts: Drafting,
        transcript: Transcript,
        cancel: threading.Event | None = None,
    ) -> None:
        self.members = tuple(members)
        self.transcript = transcript
        self.cancel = cancel
        self.abandoned = threading.Event()
        self.asking: list[Asking] = []
        self._rounds: list[Round] = []
        self._steps = decode(self.members, config, drafts, transcript, self._rounds)

    @property
    def is_over(self) -> bool:
        """Whether the caller wants no more."""
        return self.abandoned.is_set() or (self.cancel is not None and self.cancel.is_set())

    def resume(self, deliver: Outbox) -> bool:
        """Run to the next question. Returns False once the request is over; its last event or
        its error has then been delivered.
        """
        try:
            if self.abandoned.is_set():
                return False
            if self.is_over:
                deliver(self._cancelled())
                return False
            for step in self._steps:
                if isinstance(step, tuple):
                    self.asking = list(step)
                    return True
                deliver(step)
        except BaseException as error:  # whatever broke this request must not break the others
            deliver(error)
        return False

    def release(self) -> None:
        """Free what the members hold for this request."""
        self._steps.close()
        for member in self.members:
            _release(member)

    def _cancelled(self) -> StreamEvent:
        shown = self.transcript.flush()
        generation = summarise(self.members, self.transcript, self._rounds, "cancelled")
        return StreamEvent(text=shown, round=None, generation=generation)


_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is still inside a model when the interpreter goes away aborts the process."""
    for scheduler in list(_running):
        scheduler.close(timeout=EXIT_SECONDS)


class Scheduler:
    """Runs requests on one worker thread, which starts with the first and ends when idle."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        self._runtime = runtime
        self._changed = threading.Condition()
        self._arrived: deque[tuple[Request, Outbox]] = deque()
        self._worker: threading.Thread | None = None
        self._closed = False
        _running.add(self)

    def submit(self, request: Request, deliver: Outbox) -> None:
        """Start a request. `deliver` is called on the worker thread with each event, the last
        of which carries the generation, or with the error that ended the request.

        Raises:
            EngineClosedError: the scheduler was closed.
        """
        with self._changed:
            if self._closed:
                raise EngineClosedError("this engine was closed; make a new one")
            self._arrived.append((request, deliver))
            if self._worker is None or not self._worker.is_alive():  # dead after a fork
                self._worker = threading.Thread(target=self._run, name="adafuse", daemon=True)
                self._worker.start()
            self._changed.notify()

    def close(self, timeout: float | None = None) -> None:
        """End running requests with `EngineClosedError` and wait for the worker to finish.

        Args:
            timeout: seconds to wait at most.
        """
        with self._changed:
            self._closed = True
            worker = self._worker
            self._changed.notify()
        if worker is not None and worker is not threading.current_thread():
            worker.join(timeout)

    def _run(self) -> None:
        active: dict[Request, Outbox] = {}
        try:
            while self._admit(active):
                if active:
                    self._evaluate(active)
        except BaseException as error:  # a defect of this module; nobody may wait forever
            logger.exception("the scheduler failed")
            with self._changed:
                self._worker = None
                active.update(self._arrived)
                self._arrived.clear()
            for request in list(active):
                self._finish(request, active, error)

    def _admit(self, active: dict[Request, Outbox]) -> bool:
        """Take in new requests, first come first served, waiting for one if there is nothing to
        do; False to end.
        """
        with self._changed:
            while not active and not self._arrived and not self._closed:
                if not self._changed.wait(IDLE_SECONDS):
                    break
            closed = self._closed
            room = len(self._arrived) if closed else self._runtime.max_requests - len(active)
            arrived = [self._arrived.popleft() for _ in range(min(room, len(self._arrived)))]
            if not active and not arrived:
                self._worker = None
                return False
        active.update(arrived)
        for request in list(active) if closed else ():
            self._finish(request, active, EngineClosedError("this engine was closed"))
        for request, _ in () if closed else arrived:
            self._resume(request, active)
        return True

    def _evaluate(self, active: dict[Request, Outbox]) -> None:
        """Evaluate all that is asked of the member that the first request waits for."""
        for request in list(active):
            if request.is_over:
                self._resume(request, active)
        backend = next((each.asking[0].member.backend for each in active), None)
        if backend is None:
            return
        group = [
            (request, asking)
            for request in active
            for asking in request.asking
            if asking.member.backend is backend
        ]
        answers = _answer(backend, [asking for _, asking in group])
        for (request, asking), error in zip(group, answers, strict=True):
            request.asking.remove(asking)
            if error is not None:
                self._finish(request, active, error)
            elif not request.asking:
                self._resume(request, active)

    def _resume(self, request: Request, active: dict[Request, Outbox]) -> None:
        if not request.resume(active[request]):
            self._finish(request, active)
        elif len(active) > 1:  # to the back of the queue
            active[request] = active.pop(request)

    def _finish(
        self,
        request: Request,
        active: dict[Request, Outbox],
        error: BaseException | None = None,
    ) -> None:
        deliver = active.pop(request)
        request.release()
        if error is not None:
            deliver(error)


def _release(member: Member) -> None:
    try:
        member.backend.release(member.tree)
    except Exception:  # the request is over; its result must not depend on this
        logger.exception("member %r failed to release a request", member.name)


def _answer(backend: Backend, asking: Sequence[Asking]) -> list[AdaFuseError | None]:
    """Have a backend answer what is asked of it; an error or None for each.

    If a shared evaluation fails, each is evaluated alone, so that only those at fault fail; what
    fails alone is tried without its drafts, which nobody has asked for.
    """
    failure: BaseException | None = None
    try:
        started = time.perf_counter()
        answers = backend.evaluate([each.ask for each in asking])
        seconds = (time.perf_counter() - started) / len(asking)
        for each, answer in zip(asking, answers, strict=True):
            each.member.learn(each.ask, answer, seconds)
    except BaseException as error:  # libraries raise these too; the thread is ours
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the pass
        failure = error
    if failure is None:
        return [None] * len(asking)
    if len(asking) > 1:
        return [_answer(backend, [each])[0] for each in asking]
    if asking[0].drafts:
        return _answer(backend, [asking[0].without_drafts()])
    return [_member_error(backend.name, failure)]


def _member_error(name: str, error: BaseException) -> AdaFuseError:
    if isinstance(error, AdaFuseError):
        return error
    reason = f"{type(error).__name__}: {error}"
    wrapped = MemberError(name, reason)
    if _is_out_of_memory(error):
        wrapped = MemberOutOfMemoryError(
            name,
            f"out of memory ({reason}). Use a shorter prompt, fewer requests at once, "
            "a smaller dtype or another device",
        )
    wrapped.__cause__ = error
    return wrapped


def _is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)  # torch on a CPU
    )
