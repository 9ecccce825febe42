"""The command, and what it shares with `adafuse`."""

import pytest

from benchmarks.paper.__main__ import create_app
from tests.support.commands import fakes, interrupted_while_loading, runner

__all__ = ["fakes", "interrupted_while_loading"]  # fixtures


@pytest.fixture
def paper():
    """Run `python -m benchmarks.paper` in this process."""
    return runner(create_app())
