"""What the checks report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Violation:
    """A rule that a backend breaks.

    Attributes:
        check: name of the check.
        rule: the rule.
        found: what the check did, what it expected and what it got.
    """

    check: str
    rule: str
    found: str

    def __str__(self) -> str:
        return f"{self.check}: {self.found} Rule: {self.rule}"


class ConformanceError(AssertionError):
    """A backend breaks rules of the protocol.

    Attributes:
        violations: the broken rules.
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        lines = "".join(f"\n- {violation}" for violation in self.violations)
        what = (
            "1 check" if count == 1 else f"{count} checks. The first failure may cause the others"
        )
        super().__init__(f"the backend fails {what}:{lines}")


class BrokenRuleError(Exception):
    """A check has found that a backend breaks the rule of the check."""


def fail(found: str) -> NoReturn:
    """Report that the backend breaks the rule of the running check.

    Raises:
        BrokenRuleError: always.
    """
    raise BrokenRuleError(found)


def expect(holds: object, found: str) -> None:
    """Report that the backend breaks the rule of the running check, unless `holds` is true.

    Raises:
        BrokenRuleError: `holds` is false.
    """
    if not holds:
        fail(found)
