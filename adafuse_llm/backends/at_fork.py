"""Let a forked child process make connections of its own.

Programs such as gunicorn (``--preload``) and celery load an engine, and then fork their workers. A
child must not share its parent's connections. The parent must not run requests while it forks.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

_renewals: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def after_fork(renew: Callable[[], None]) -> None:
    """Call the bound method `renew` now, and in every forked process while its object lives."""
    renew()
    _renewals[renew.__self__] = renew.__func__  # type: ignore[attr-defined]  # a bound method


def _renew_all() -> None:
    for owner, renew in list(_renewals.items()):
        renew(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
