"""How processes end that native code takes down."""

from __future__ import annotations

import signal
from typing import Final

SIGNALS: Final = frozenset({"SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT"})
"""The signals of crashes. Others come from outside, such as SIGKILL if memory runs out."""

WINDOWS_CODE: Final = 0xC0000000
"""The smallest exit code of crashes on Windows."""


def signal_name(code: int) -> str:
    """Return the name of the signal that ended a process with a negative exit code."""
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"{-code}"


def crash_of(code: int) -> str | None:
    """Return what crash a process ended with, such as ``"signal SIGSEGV"``, or None.

    Args:
        code: the exit code of the process, as `subprocess` gives it.
    """
    if code >= WINDOWS_CODE:
        return f"exit code {code:#x}"
    if code < 0 and (name := signal_name(code)) in SIGNALS:
        return f"signal {name}"
    return None
