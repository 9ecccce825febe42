"""Measure runs, write the table, and describe the machine."""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Counts(NamedTuple):
    """Bytes of text, and passes and tokens of the last member."""

    bytes: int
    passes: int = 0
    tokens: int = 0


class Cost(NamedTuple):
    """The cost of a run: CPU seconds of all threads, wall-clock seconds, and its counts."""

    cpu: float
    wall: float
    counts: Counts

    @property
    def per_byte(self) -> float:
        """CPU seconds per byte of text."""
        return self.cpu / max(1, self.counts.bytes)

    @property
    def wall_per_byte(self) -> float:
        """Seconds per byte of text."""
        return self.wall / max(1, self.counts.bytes)


class Line(NamedTuple):
    """A line of the table: what is measured, of which system, and its values, one per chat."""

    what: str
    system: str
    values: Sequence[float]


def timed(work: Callable[[], Counts]) -> Cost:
    """Run a function, and return its cost."""
    cpu, wall = time.process_time(), time.perf_counter()
    counts = work()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall, counts)


def table(lines: Iterable[Line]) -> str:
    """Return lines as a Markdown table of medians and ranges."""
    rows = ["| what | system | median | range |", "|---|---|---:|---:|"]
    for line in lines:
        low, high = min(line.values), max(line.values)
        spread = f"{low:.2f} to {high:.2f}" if len(line.values) > 1 else ""
        median = statistics.median(line.values)
        rows.append(f"| {line.what} | {line.system} | {median:.2f} | {spread} |")
    return "\n".join(rows)


def read_lines(part: Mapping[str, Any]) -> list[Line]:
    """Return the lines of a part of a stored file."""
    return [Line(**each) for each in part["lines"]]


def machine() -> dict[str, str]:
    """Describe the machine, its load, the date and the versions."""
    import torch
    import transformers

    import adafuse_llm

    return {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%d %B %Y, %H:%M UTC"),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "threads": str(torch.get_num_threads()),
        "versions": f"adafuse-llm {adafuse_llm.__version__}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
