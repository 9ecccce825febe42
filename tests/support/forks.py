"""Run something in a forked child."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SECONDS = 60


def in_child(task: Callable[[], object]) -> bool:
    """Return whether `task` gives a true result in a forked child, in time."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if task() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    return done == (child, 0)
