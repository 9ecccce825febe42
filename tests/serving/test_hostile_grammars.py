"""A server among clients that send grammars to kill, block or fill it."""

import math
import sys

import pytest

from benchmarks import fuzz_grammars

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")


@pytest.mark.slow
def test_hostile_requests_harm_nobody() -> None:
    cases = 30
    report = fuzz_grammars.run(range(cases), 3, 3, alone=cases // 5)
    assert report.is_good, report.faults
    assert report.outcomes.total() == cases
    assert report.outcomes["400"] > cases // 10
    assert report.outcomes["200"] > cases // 10
    assert sum(map(len, report.beside)) > cases // 10
    assert not math.isnan(report.memory[-1])
