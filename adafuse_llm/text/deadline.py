"""Stop Python code that takes too long, such as an endless loop in a chat template."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.05
"""Seconds between two looks at the time that a thread has taken."""


class _Stopped(SystemExit):
    """Raised in a thread that has taken too long. ``except Exception`` does not catch it."""


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """Call `work` in a thread of its own, and return its result.

    If `work` takes more than `seconds` of CPU time, its thread is stopped; a busy machine does not
    stop it. Systems that do not count the CPU time of threads, such as macOS and Windows, count the
    time that passes. This works for Python code, loops included. A call into C code ends only when
    it returns. `work` should therefore hold no lock while it runs code that may be endless.

    Raises:
        TimeoutError: `work` took longer.
        BaseException: `work` raised this exception.
    """
    future: Future[T] = Future()
    start = time.monotonic()
    clocks: list[int] = []

    def run() -> None:
        try:
            if hasattr(time, "pthread_getcpuclockid"):
                clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
            future.set_result(work())
        except BaseException as error:  # the caller raises it
            future.set_exception(error)

    thread = threading.Thread(target=run, name="adafuse deadline", daemon=True)
    thread.start()
    late = True
    try:
        while late:
            thread.join(POLL_SECONDS)
            late = thread.is_alive()
            if late and _spent(clocks, start) > seconds:
                break
    finally:  # the wait can be interrupted, too, for example by Ctrl-C
        if late:
            _stop(thread)
    if late:
        raise TimeoutError(f"it took longer than {seconds:g} seconds")
    return future.result()


def _spent(clocks: Sequence[int], start: float) -> float:
    """Return the CPU seconds of a thread, or the seconds since its start if they are not known."""
    try:
        return time.clock_gettime(clocks[0])
    except (IndexError, OSError):  # the thread ends at this moment
        return 0.0 if hasattr(time, "pthread_getcpuclockid") else time.monotonic() - start


def _stop(thread: threading.Thread) -> None:
    """Raise `_Stopped` in another thread, at its next Python instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped)
    )
