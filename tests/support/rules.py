"""The rules of backends, for tests that make their backend in a fixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adafuse_llm.backends import Backend
from adafuse_llm.testing import BackendTests


def check_rules(
    make: Callable[[], Backend], logits: Callable[[Sequence[int]], Any] | None, limit: float
) -> tuple[str, ...]:
    """Check all rules of a backend, up to a difference of log-probabilities.

    Returns:
        The names of the tests that apply.
    """

    class Rules(BackendTests):
        tolerance = limit

        def member(self) -> Backend:
            return make()

        def logits(self, ids: Sequence[int]) -> Any:
            return None if logits is None else logits(ids)

    return Rules.check_all()
