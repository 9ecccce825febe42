"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return freed memory to the operating system if the C library is glibc.

    glibc keeps freed memory for each thread that has allocated memory. Without this function, every
    new engine would increase the amount of such memory.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return  # the C library is not glibc
