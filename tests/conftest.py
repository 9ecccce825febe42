"""Set-up shared by all tests: offline, and one thread (tiny models are faster with one)."""

from __future__ import annotations

import os
from collections import Counter

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import compare
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "adafuse",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("adafuse")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tally = compare.TALLY
    if tally.decodes:
        terminalreporter.write_line(f"compared with the reference: {tally}")
    standard = Counter(
        outcome
        for outcome in ("passed", "skipped", "failed", "xfailed", "xpassed", "error")
        for report in terminalreporter.getreports(outcome)
        if "langchain/test_standard.py" in report.nodeid
    )
    if standard:
        counted = ", ".join(f"{count} {outcome}" for outcome, count in standard.items())
        terminalreporter.write_line(f"LangChain's standard tests of chat models: {counted}")
