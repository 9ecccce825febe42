"""Data for line and bar charts. Positions are percentages of the width or height of the chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Bar = tuple[str, float, str, str | None]
"""The label of a bar, its value, the value as text, and its color."""

LABELS = 12
"""Maximum number of labels below a line chart."""


@dataclass(frozen=True)
class Point:
    """A point of a line chart, with its tooltip."""

    x: float
    y: float
    tooltip: str


@dataclass(frozen=True)
class Series:
    """The points of one line with its color and its dashes."""

    points: Sequence[Point]
    color: str = "var(--quiet)"
    dashes: str = ""


def line_chart(series: Sequence[Series], *, most: float | None = None) -> dict[str, Any] | None:
    """Return the data for the template of a line chart, or None if there are no points.

    Args:
        series: the lines.
        most: upper end of the vertical axis. Default: the largest value.
    """
    points = [point for line in series for point in line.points]
    if not points:
        return None
    most = most or max(point.y for point in points) or 1.0
    places = sorted({point.x for point in points})
    left, right = places[0], places[-1]

    def across(x: float) -> float:
        return round(100 * (x - left) / (right - left), 2) if right > left else 50.0

    def down(y: float) -> float:
        return round(100 * (1 - y / (most or 1.0)), 2)

    step = max(1, -(-len(places) // LABELS))
    return {
        "ticks": [{"y": down(value), "shown": f"{value:.3g}"} for value in (0.0, most / 2, most)],
        "labels": [{"x": across(x), "shown": f"{x + 1:g}"} for x in places[::step]],
        "lines": [
            {
                "color": line.color,
                "dashes": line.dashes,
                "points": " ".join(f"{across(p.x)},{down(p.y)}" for p in line.points),
                "dots": [
                    {"x": across(p.x), "y": down(p.y), "tooltip": p.tooltip} for p in line.points
                ],
            }
            for line in series
        ],
    }


def bar_chart(values: Sequence[Bar], most: float | None = None) -> list[dict[str, Any]]:
    """Return the rows of a bar chart from 0 to `most` (default: the largest value)."""
    top = most or max((value for _, value, *_ in values), default=0.0) or 1.0
    return [
        {"label": label, "color": color, "share": round(100 * value / top, 2), "shown": shown}
        for label, value, shown, color in values
    ]
