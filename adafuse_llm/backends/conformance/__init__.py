"""Check that a backend keeps the rules of the protocol `Backend` and of its extensions.

A `Subject` describes the backend: how to make one and, if possible, what a plain forward pass of
its model returns. Each check in `CHECKS` tests one rule. A check raises `ConformanceError` if the
backend breaks the rule. In pytest::

    SUBJECT = conformance.Subject(make_backend, logits=plain_logits)

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=str)
    def test_the_backend_keeps_the_rules(check):
        check(SUBJECT)

`run_checks` runs all checks without pytest, and reports all broken rules together.
"""

from adafuse_llm.backends.conformance.checks import CHECKS, Check, Report, run_checks
from adafuse_llm.backends.conformance.subject import ODD_TEXTS, TEXTS, Subject
from adafuse_llm.backends.conformance.violations import ConformanceError, Violation

__all__ = [
    "CHECKS",
    "ODD_TEXTS",
    "TEXTS",
    "Check",
    "ConformanceError",
    "Report",
    "Subject",
    "Violation",
    "run_checks",
]
