"""Recreate locks in a forked child, where the parent's threads no longer exist."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

_methods: set[weakref.WeakMethod[Callable[[], None]]] = set()


def after_fork(method: Callable[[], None]) -> None:
    """Call a bound method now, and again in every forked child while the method's object lives."""
    method()
    _methods.add(weakref.WeakMethod(method, _methods.discard))


def _call_all() -> None:
    for reference in list(_methods):
        if (method := reference()) is not None:
            method()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_call_all)
