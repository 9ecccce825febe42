"""Counts of what the tests have compared with the reference."""

from __future__ import annotations

from collections import Counter

TALLY: Counter[str] = Counter()
"""How much has been compared so far."""
