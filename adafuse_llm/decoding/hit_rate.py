"""How often the guesses of a source of drafts are right, measured in one request."""

from __future__ import annotations

DRAFT_CHANCE = 0.3
"""A token is drafted if the chance that it is needed is at least this high, and at least as high as
its price (`adafuse_llm.decoding.costs`). The limit rises while a member processes many tokens
(`adafuse_llm.decoding.draft`)."""

MAX_DRAFT_TOKENS = 16
"""Maximum number of tokens drafted in a row."""

PRIOR_OBSERVATIONS, MAX_OBSERVATIONS = 4, 20
"""Weight of the initial value in observations, and maximum number of observations in an average."""


class HitRate:
    """Moving average of how often a guess was right.

    Args:
        value: the initial value, which counts as `PRIOR_OBSERVATIONS` observations.
    """

    __slots__ = ("_seen", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self._seen = PRIOR_OBSERVATIONS

    def learn(self, right: bool) -> None:
        """Record whether a guess was right."""
        self._seen = min(self._seen + 1, MAX_OBSERVATIONS)
        self.value += (right - self.value) / self._seen
