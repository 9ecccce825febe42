"""Sizes of tests: small by default, and larger with ``--all``."""

from typing import TypeVar

Value = TypeVar("Value")

sweeps = False
"""Whether tests run with ``--all``. `tests/conftest.py` sets it before tests are imported."""


def sized(usual: Value, swept: Value) -> Value:
    """Return the size of a test: `usual`, or `swept` with ``--all``.

    Mark the test with ``sweep(1)``, so that ``make test-all`` runs it.
    """
    return swept if sweeps else usual
