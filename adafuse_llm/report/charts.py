"""Lines and bars of charts, in percent of a box that the page gives its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LABELS = 12
"""Most labels below a chart of lines, where every point would have one."""


@dataclass(frozen=True)
class Point:
    """A value with its place, what is told of it, and the bounds of its interval."""

    x: float
    y: float
    told: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one line: color, dashes, and a name where there is a legend."""

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
    """What the template of a line chart needs; None without points.

    Args:
        series: the lines.
        least: where the vertical axis begins.
        most: where it ends; default: the largest value.
        labels: of the horizontal axis by place; default: some of the places, counted from 1.
        axis: what the horizontal axis means.
    """
    points = [point for each in series for point in each.points]
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
        "named": any(each.name for each in series),
        "lines": [
            {
                "name": each.name,
                "color": each.color,
                "dashes": each.dashes,
                "beside": 4 * (2 * place - len(series) + 1),  # pixels: intervals stay apart
                "points": " ".join(f"{across(p.x)},{down(p.y)}" for p in each.points),
                "dots": [
                    {
                        "x": across(p.x),
                        "y": down(p.y),
                        "told": p.told,
                        "top": None if p.high is None else down(p.high),
                        "tall": 0
                        if p.high is None or p.low is None
                        else round(down(p.low) - down(p.high), 2),
                    }
                    for p in each.points
                ],
            }
            for place, each in enumerate(series)
        ],
    }


@dataclass(frozen=True)
class Bar:
    """A bar: its label, its value, what is written beside it, its interval, its color."""

    label: str
    value: float
    shown: str
    low: float | None = None
    high: float | None = None
    color: str | None = None


def bar_chart(values: Sequence[Bar], most: float | None = None) -> list[dict[str, Any]]:
    """Rows of a bar chart from 0 to `most` (default: the largest value)."""
    top = most or max((each.high or each.value for each in values), default=0.0) or 1.0
    return [
        {
            "label": each.label,
            "color": each.color,
            "share": round(100 * each.value / top, 2),
            "shown": each.shown,
            "whisker": None
            if each.low is None or each.high is None
            else {
                "left": round(100 * each.low / top, 2),
                "width": round(100 * (each.high - each.low) / top, 2),
            },
        }
        for each in values
    ]
