"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return memory that was freed to the system, where the C library keeps it for itself.

    glibc does, for every thread that ever allocated: each engine's threads would add to it.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return  # another C library
