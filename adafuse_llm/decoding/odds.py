"""How often a source of drafts was right in this request."""

from __future__ import annotations

import math

DRAFT_ODDS = 0.5
"""Odds of being asked for from which a token is drafted: what a token more costs of a pass, and
what it may cost in vain."""

MAX_DRAFT_TOKENS = 16
"""Most tokens drafted in a row."""

PRIOR_OBSERVATIONS, MAX_OBSERVATIONS = 4, 20
"""Observations that a first guess counts for, and that an average remembers."""

PRIOR_ODDS = 0.5
"""Odds of what nothing is known about."""


class Odds:
    """How often something was right: an average that follows the request.

    Args:
        value: what is assumed at first; it counts as much as `PRIOR_OBSERVATIONS` observations.
    """

    __slots__ = ("_seen", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self._seen = PRIOR_OBSERVATIONS

    def learn(self, right: bool) -> None:
        """Take in an observation."""
        self._seen = min(self._seen + 1, MAX_OBSERVATIONS)
        self.value += (right - self.value) / self._seen

    def length(self, first: float = 1.0, threshold: float = DRAFT_ODDS) -> int:
        """Return how many in a row are all right with odds of at least `threshold`.

        Args:
            first: odds of what the first depends on.
            threshold: the lowest odds that count.
        """
        if first * self.value < threshold:
            return 0
        if self.value**MAX_DRAFT_TOKENS * first >= threshold:
            return MAX_DRAFT_TOKENS
        return int(math.log(threshold / first) / math.log(self.value))
