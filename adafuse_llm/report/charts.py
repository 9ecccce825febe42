"""Data for line and bar charts. Positions are percentages of the width or height of the chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LABELS = 12
"""Maximum number of labels below a line chart for which the caller passes no labels."""


@dataclass(frozen=True)
class Point:
    """A point of a line chart, with its tooltip and the bounds of its interval."""

    x: float
    y: float
    tooltip: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """The points of one line with its color, its dashes, and its name in the legend."""

    points: Sequence[Point]
    color: str = "var(--quiet)"
    dashes: str = ""
    name: str = ""


def line_chart(
    series: Sequence[Series],
    *,
    least: float = 0.0,
    most: float | None = None,
    labels: Mapping[float, str] | None = None,
    axis: str = "",
) -> dict[str, Any] | None:
    """Return the data for the template of a line chart, or None if there are no points.

    Args:
        series: the lines.
        least: lower end of the vertical axis.
        most: upper end of the vertical axis. Default: the largest value.
        labels: labels of the horizontal axis by x. Default: at most `LABELS` numbers, starting
            with 1.
        axis: title of the horizontal axis.
    """
    points = [point for line in series for point in line.points]
    if not points:
        return None
    tops = [point.y if point.high is None else point.high for point in points]
    most = most or max(*tops, least) or 1.0
    places = sorted({point.x for point in points})
    left, right = places[0], places[-1]

    def across(x: float) -> float:
        return round(100 * (x - left) / (right - left), 2) if right > left else 50.0

    def down(y: float) -> float:
        return round(100 * (1 - (y - least) / ((most or 1.0) - least)), 2)

    if labels is None:
        step = max(1, -(-len(places) // LABELS))
        labels = {x: f"{x + 1:g}" for x in places[::step]}
    return {
        "axis": axis,
        "ticks": [
            {"y": down(value), "shown": f"{value:.3g}"}
            for value in (least, (least + most) / 2, most)
        ],
        "labels": [{"x": across(x), "shown": shown} for x, shown in labels.items()],
        "named": any(line.name for line in series),
        "lines": [
            {
                "name": line.name,
                "color": line.color,
                "dashes": line.dashes,
                "offset": 4 * (2 * index - len(series) + 1),  # in pixels; keeps the intervals apart
                "points": " ".join(f"{across(p.x)},{down(p.y)}" for p in line.points),
                "dots": [
                    {
                        "x": across(p.x),
                        "y": down(p.y),
                        "tooltip": p.tooltip,
                        "top": None if p.high is None else down(p.high),
                        "tall": 0
                        if p.high is None or p.low is None
                        else round(down(p.low) - down(p.high), 2),
                    }
                    for p in line.points
                ],
            }
            for index, line in enumerate(series)
        ],
    }


@dataclass(frozen=True)
class Bar:
    """A bar with its label, its value, the value as text, its interval and its color."""

    label: str
    value: float
    shown: str
    low: float | None = None
    high: float | None = None
    color: str | None = None


def bar_chart(values: Sequence[Bar], most: float | None = None) -> list[dict[str, Any]]:
    """Return the rows of a bar chart from 0 to `most` (default: the largest value)."""
    top = most or max((bar.high or bar.value for bar in values), default=0.0) or 1.0
    return [
        {
            "label": bar.label,
            "color": bar.color,
            "share": round(100 * bar.value / top, 2),
            "shown": bar.shown,
            "whisker": None
            if bar.low is None or bar.high is None
            else {
                "left": round(100 * bar.low / top, 2),
                "width": round(100 * (bar.high - bar.low) / top, 2),
            },
        }
        for bar in values
    ]
