"""Decode the jobs of a suite in several processes, each with an engine of its own.

A task is decoded in blocks of questions. All systems answer a block, one after another, before the
next one begins, so that a member reads a prompt once for all systems. Only one process at a time
works on a task.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from typing import Any, Final

from adafuse_llm.cli.common import Setup
from adafuse_llm.errors import AdaFuseError
from benchmarks.paper.arguments import Given, LazyEngine, check_arguments, make_runner
from benchmarks.paper.run import Cancelled, Job, Runner

SHORT_WAIT: Final = 0.2
"""Seconds between two checks whether Ctrl-C was pressed."""

BLOCK: Final = 32
"""Number of questions of a block."""


def decode_in_processes(
    jobs: Sequence[Job],
    workers: int,
    setup: Setup,
    given: Given,
    members: Sequence[str],
    *,
    cancel: threading.Event,
    on_answers: Callable[[int], object],
) -> float:
    """Decode jobs, and write their records. Return the processor seconds of all processes.

    Args:
        jobs: the jobs.
        workers: number of processes.
        setup: the setup of the members, before `check_arguments`.
        given: the arguments of the command.
        members: names of the members that take part.
        cancel: event that stops decoding.
        on_answers: called with the number of answers of a block after they are written.

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
        tasks = _blocks(jobs)
        running: dict[Future[tuple[float, int]], str] = {}
        try:
            while running or any(tasks.values()):
                idle = [task for task in tasks if tasks[task] and task not in running.values()]
                idle.sort(key=lambda task: len(tasks[task]), reverse=True)
                for task in idle[: workers - len(running)]:
                    running[pool.submit(_decode, tasks[task].popleft())] = task
                done, _ = wait(running, timeout=SHORT_WAIT, return_when=FIRST_COMPLETED)
                if cancel.is_set():
                    raise Cancelled
                for each in done:
                    del running[each]
                    taken, answers = each.result()
                    seconds += taken
                    on_answers(answers)
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


def _blocks(jobs: Sequence[Job]) -> dict[str, deque[list[Job]]]:
    """Return the blocks of each task, in order. A block is the jobs of its systems."""
    tasks: dict[str, deque[list[Job]]] = defaultdict(deque)
    for end in range(BLOCK, max(job.questions for job in jobs) + BLOCK, BLOCK):
        block: dict[str, list[Job]] = defaultdict(list)
        for job in jobs:
            if job.questions > end - BLOCK:
                block[job.task].append(job.first(end))
        for task, of_task in block.items():
            tasks[task].append(of_task)
    return tasks


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


def _decode(jobs: Sequence[Job]) -> tuple[float, int]:
    """Decode jobs of a task. Return the processor seconds, and the number of new answers."""
    before, answers = time.process_time(), 0
    runner: Runner = _state["runner"]
    with _cancelled_by(_state["stop"]) as cancel:
        for job in jobs:
            missing = runner.missing(job)
            runner.records(job, keep_prefixes=answers > 0, cancel=cancel)
            answers += missing
    return time.process_time() - before, answers


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
