"""Time systems, and collect rows, targets and figures."""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The result of one run of a system. All counts are per member.

    Attributes:
        text: the response.
        tokens: number of new tokens in the response.
        passes: number of forward passes.
        processed: number of tokens in those passes, including the prompt.
        prompt: number of tokens in the prompt.
        parts: duration of named parts of the run, in seconds.
    """

    text: str
    tokens: Mapping[str, int]
    passes: Mapping[str, int]
    processed: Mapping[str, int]
    prompt: Mapping[str, int]
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A system at a point of a comparison, with its times and the outcome of its last run.

    Attributes:
        seconds: the times of the repeats.
        parts: the times of the repeats for each named part of the run.
    """

    comparison: str
    point: str
    system: str
    seconds: tuple[float, ...]
    outcome: Outcome
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The median time in seconds."""
        return statistics.median(self.seconds)

    def part(self, name: str) -> float:
        """Return the median time of a part in seconds."""
        return statistics.median(self.parts[name])

    @property
    def bytes(self) -> int:
        """The number of bytes of output."""
        return len(self.outcome.text.encode())

    @property
    def per_byte(self) -> float:
        """The median seconds per byte of output, including the time for the prompt."""
        return self.median / max(1, self.bytes)

    @property
    def per_token(self) -> float:
        """Tokens processed after the prompt per committed token, over all members."""
        run = self.outcome
        processed = sum(run.processed.values()) - sum(run.prompt.values())
        return processed / max(1, sum(run.tokens.values()))

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain data, with the median and extremes of its times."""
        return {
            **asdict(self),
            "median": self.median,
            "min": min(self.seconds),
            "max": max(self.seconds),
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class Target:
    """A target of the ensemble.

    `limit` is a lower limit if `at_least` is true. Otherwise it is an upper limit.
    """

    name: str
    measured: float
    limit: float
    at_least: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the measured value meets the limit."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


@dataclass
class Report:
    """The measurements so far."""

    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    figures: list[tuple[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all measurements as plain data."""
        return {
            "targets": [{**asdict(each), "met": each.met} for each in self.targets],
            "figures": dict(self.figures),
            "rows": [row.as_json() for row in self.rows],
        }


System = Callable[[], Outcome]


def take_turns(
    comparison: str,
    point: str,
    systems: Mapping[str, System],
    repeats: int,
    *,
    warm: Collection[str] = (),
) -> dict[str, Row]:
    """Time the systems in turns, so that a slow period of the machine affects all of them.

    Args:
        comparison: name of the comparison that the rows belong to.
        point: sizes at which the systems are compared.
        systems: systems by name; each runs once before it is timed.
        repeats: number of timed runs of each system.
        warm: names of systems that have run before and need no warm-up.
    """
    for name, system in systems.items():
        if name not in warm:
            system()
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, system in systems.items():
            start = time.perf_counter()
            outcome = system()
            seconds[name].append(time.perf_counter() - start)
            outcomes[name].append(outcome)
    return {
        name: Row(
            comparison,
            point,
            name,
            tuple(seconds[name]),
            outcomes[name][-1],
            {
                part: tuple(outcome.parts[part] for outcome in outcomes[name])
                for part in outcomes[name][-1].parts
            },
        )
        for name in systems
    }


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


def as_markdown(report: Report, header: Mapping[str, str]) -> str:
    """Format the report as Markdown: header, targets, figures and rows."""
    lines = [*(f"- {name}: {value}" for name, value in header.items()), ""]
    if report.targets:
        lines += ["| target | measured | wanted | met |", "|---|---:|---:|---|"]
        lines += [
            f"| {each.name} | {each.measured:.3g} {each.unit} "
            f"| {'≥' if each.at_least else '≤'} {each.limit:g} {each.unit} "
            f"| {'yes' if each.met else '**no**'} |"
            for each in report.targets
        ]
        lines.append("")
    if report.figures:
        lines += ["| figure | measured |", "|---|---:|"]
        lines += [f"| {name} | {value} |" for name, value in report.figures]
        lines.append("")
    if report.rows:
        lines += [
            "Times are medians with the extremes; passes and tokens (the prompt's included) are "
            "those of each member, in member order.",
            "",
            "| comparison | point | system | seconds | ms/byte | new tokens | forward passes "
            "| tokens processed |",
            "|---|---|---|---:|---:|---:|---:|---:|",
            *(_line(row) for row in report.rows),
            "",
        ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    run = row.outcome
    cells = [
        row.comparison,
        row.point,
        row.system,
        f"{row.median:.3f} ({min(row.seconds):.3f} to {max(row.seconds):.3f})",
        f"{1000 * row.per_byte:.2f}",
        *(_slashed(list(counts.values())) for counts in (run.tokens, run.passes, run.processed)),
    ]
    return f"| {' | '.join(cells)} |"


def _slashed(counts: Sequence[int]) -> str:
    return " / ".join(f"{count:,}" for count in counts)
