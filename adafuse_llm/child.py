"""Run a function of this package in a child process with limits.

Native code can crash, hang or fill the memory, and so can a stranger's chat template or grammar.
What has run in a child process without harm is safe in this process.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Final

MARK: Final = "ADAFUSE_TRIAL"
"""Environment variable that marks child processes, which start no others. Otherwise, an application
whose executable is not plain Python could start itself without end."""

BOOTSTRAP: Final = """
import importlib, json, sys, types
folder, sys.path[:], module, task, arguments = json.load(sys.stdin)
package = sys.modules["adafuse_llm"] = types.ModuleType("adafuse_llm")
package.__path__ = [folder]  # without the imports of the package, which take longer than most tasks
run = getattr(importlib.import_module(module), task)
run(**arguments)
"""
"""Program of a child process, which reads its task and the arguments from standard input."""

READY: Final = "ready\n"
"""The line that a child process writes when its task begins."""

OUT_OF_TIME: Final = -getattr(signal, "SIGXCPU", 24)
"""Exit code of a child process that has used up its CPU time."""


def run_limited(
    task: Callable[..., None], seconds: float, /, **arguments: object
) -> subprocess.CompletedProcess[str]:
    """Run a function of this package in a child process for at most `seconds`.

    The task gets `arguments` as JSON data. It must call `begin` before it limits the process.

    Returns:
        The process that has ended. Its ``stdout`` is the text that the task wrote after `begin`.

    Raises:
        OSError: the task did not begin, for example because the executable is not plain Python.
        subprocess.TimeoutExpired: the process took longer than `seconds`, and was killed.
    """
    if MARK in os.environ or getattr(sys, "frozen", False):
        raise OSError("this application is no Python interpreter")
    start = [str(Path(__file__).parent), [*map(str, sys.path)], task.__module__, task.__name__]
    child = subprocess.run(  # noqa: S603  # this interpreter, and our own code
        [os.fsdecode(spawn.get_executable() or ""), "-I", "-c", BOOTSTRAP],
        input=json.dumps([*start, arguments]),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        # without MALLOC_ARENA_MAX, the GNU C library may reserve 64 MiB of memory per thread
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "GGML_NO_BACKTRACE": "1", MARK: "1"},
        start_new_session=True,  # Ctrl-C is meant for this process
        check=False,
    )
    _, ready, child.stdout = child.stdout.partition(READY)
    if not ready:
        reason = child.stderr.strip().rpartition("\n")[2]
        raise OSError(f"exit code {child.returncode}: {reason}")
    return child


def begin() -> None:
    """Report to the parent process that the task begins. Earlier failures are OSErrors there."""
    sys.stdout.write(READY)
    sys.stdout.flush()


def limit_process(seconds: float, memory: int) -> None:
    """Limit how much more CPU time, in seconds, and memory, in bytes, this process may use.

    Windows has no such limits, and macOS has none for memory.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    wanted = {
        resource.RLIMIT_CPU: math.ceil(time.process_time() + seconds),
        resource.RLIMIT_CORE: 0,
    }
    with suppress(OSError):  # macOS
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        wanted[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (value if hard < 0 else min(value, hard), hard))
