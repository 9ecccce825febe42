"""Stop Python code that takes too long, such as an endless loop in a chat template."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class _Stopped(SystemExit):
    """Raised in a thread that has taken too long. ``except Exception`` does not catch it."""


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """Call `work` in a thread of its own, and return its result.

    If `work` takes longer than `seconds`, its thread is stopped. This works for Python code, loops
    included. A call into C code ends only when it returns. `work` should therefore hold no lock
    while it runs code that may be endless.

    Raises:
        TimeoutError: `work` took longer.
        BaseException: `work` raised this exception.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the caller raises it
            future.set_exception(error)

    thread = threading.Thread(target=run, name="adafuse deadline", daemon=True)
    thread.start()
    late = True
    try:
        thread.join(seconds)
        late = thread.is_alive()
    finally:  # the wait can be interrupted, too, for example by Ctrl-C
        if late:
            _stop(thread)
    if late:
        raise TimeoutError(f"it took longer than {seconds:g} seconds")
    return future.result()


def _stop(thread: threading.Thread) -> None:
    """Raise `_Stopped` in another thread, at its next Python instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped)
    )
