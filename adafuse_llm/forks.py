"""What a child of ``fork`` makes anew, as the threads that were at it are gone."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

_renewals: set[weakref.WeakMethod[Callable[[], None]]] = set()


def after_fork(renew: Callable[[], None]) -> None:
    """Call a bound method now, and in every child of this process while its owner lives."""
    renew()
    _renewals.add(weakref.WeakMethod(renew, _renewals.discard))


def _renew_all() -> None:
    for each in list(_renewals):
        if (renew := each()) is not None:
            renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
