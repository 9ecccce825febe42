"""Decode the jobs of a suite in several processes, each with an engine of its own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from typing import Any, Final

from adafuse_llm.cli.common import Setup
from adafuse_llm.errors import AdaFuseError
from benchmarks.paper.arguments import Given, LazyEngine, check_arguments, make_runner
from benchmarks.paper.run import Cancelled, Job

SHORT_WAIT: Final = 0.2
"""Seconds between two checks whether Ctrl-C was pressed."""


def decode_in_processes(
    jobs: Sequence[Job],
    workers: int,
    setup: Setup,
    given: Given,
    members: Sequence[str],
    *,
    cancel: threading.Event,
    on_job: Callable[[Job], object],
) -> float:
    """Decode jobs, and write their records. Return the processor seconds of all processes.

    Args:
        jobs: the jobs.
        workers: number of processes.
        setup: the setup of the members, before `check_arguments`.
        given: the arguments of the command.
        members: names of the members that take part.
        cancel: event that stops decoding.
        on_job: called with every job after its records are written.

    Raises:
        Cancelled: `cancel` was set before all records were complete.
        AdaFuseError: a process ended before its job was complete.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    seconds = 0.0
    with ProcessPoolExecutor(
        workers, context, initializer=_start, initargs=(setup, given, members, stop)
    ) as pool:
        running: dict[Future[float], Job] = {pool.submit(_decode, job): job for job in jobs}
        try:
            while running:
                done, _ = wait(running, timeout=SHORT_WAIT, return_when=FIRST_COMPLETED)
                if cancel.is_set():
                    raise Cancelled
                for each in done:
                    job = running.pop(each)
                    seconds += each.result()
                    on_job(job)
        except BrokenProcessPool as error:
            raise AdaFuseError(
                f"one of the {workers} processes that decode was killed. A frequent reason is that "
                "memory ran out; --workers 1 needs less. Complete answers are kept: run the same "
                "command again to resume."
            ) from error
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return seconds


_state: dict[str, Any] = {}
"""The runner of this process, and the event that stops it."""


def _start(setup: Setup, given: Given, members: Sequence[str], stop: Event) -> None:
    """Prepare a process. Its engine loads the members for the first job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process handles Ctrl-C
    arguments, setup = check_arguments(setup, given)
    share = max(1, (os.cpu_count() or 1) // arguments.suite.workers)
    setup = dataclasses.replace(setup, threads=setup.threads or share)
    engine = LazyEngine(setup, ExitStack())
    _state.update(runner=make_runner(arguments, setup, engine, members), stop=stop)


def _decode(job: Job) -> float:
    """Decode a job, and return the processor seconds that it took."""
    before = time.process_time()
    with _cancelled_by(_state["stop"]) as cancel:
        _state["runner"].records(job, cancel=cancel)
    return time.process_time() - before


@contextmanager
def _cancelled_by(stop: Event) -> Iterator[threading.Event]:
    """Yield an event for the engine, and set it when the event of the processes is set."""
    cancel, finished = threading.Event(), threading.Event()

    def watch() -> None:
        while not finished.is_set():
            if stop.wait(SHORT_WAIT):
                cancel.set()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield cancel
    finally:
        finished.set()
        watcher.join()
