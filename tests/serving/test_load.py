"""Many clients at once for a minute, in `make test-slow`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
def test_64_clients_stream_for_a_minute(tmp_path):
    output = tmp_path / "serving.json"
    command = [sys.executable, "-m", "benchmarks.serving", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(output.read_text())
    assert set(figures["requests"]) <= {"same", "left", "left running"}
    assert figures["requests"]["same"] > 64
    assert figures["requests"]["left"] > 6
    assert abs(figures["memory_growth_percent"]) < 5
