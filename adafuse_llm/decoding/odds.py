"""How often a source of drafts was right in this request."""

from __future__ import annotations

import math

DRAFT_ODDS = 0.5
"""Lowest odds of being needed at which a token is drafted. They weigh the cost of one more token in
a pass against the pass that it saves."""

MAX_DRAFT_TOKENS = 16
"""Maximum number of tokens drafted in a row."""

PRIOR_OBSERVATIONS, MAX_OBSERVATIONS = 4, 20
"""Number of observations that a first guess counts for, and the most that an average reflects."""

PRIOR_ODDS = 0.5
"""Odds assumed where nothing is known."""


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
        """Record an observation."""
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
