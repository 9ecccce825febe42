"""Data for line and bar charts. Positions are percentages of the width or height of the chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

LABELS = 12
"""Maximum number of labels below a line chart."""

POINTS = 60
"""Maximum number of points of a line. Longer lines show means of neighboring values."""


class Line(NamedTuple):
    """A line of a chart: values with the numbers of their rounds, and the look of the line."""

    values: Sequence[tuple[float, int]]
    tooltip: str = "{where}: {value:.3f} s"
    color: str = "var(--quiet)"
    dashes: str = ""


def line_chart(lines: Sequence[Line], *, most: float | None = None) -> dict[str, Any] | None:
    """Return the data for the template of a line chart, or None if there are no values.

    Args:
        lines: the lines.
        most: upper end of the vertical axis. Default: the largest value.
    """
    longest = max((len(line.values) for line in lines), default=0)
    size = max(1, -(-longest // POINTS))
    points = [_means(line, size) for line in lines]
    every = [point for each in points for point in each]
    if not every:
        return None
    top = most or max(value for _, value, _ in every) or 1.0
    places = sorted({place for place, *_ in every})
    left, right = places[0], places[-1]

    def across(place: int) -> float:
        return round(100 * (place - left) / (right - left), 2) if right > left else 50.0

    def down(value: float) -> float:
        return round(100 * (1 - value / top), 2)

    step = max(1, -(-len(places) // LABELS))
    return {
        "ticks": [{"y": down(value), "shown": f"{value:.3g}"} for value in (0.0, top / 2, top)],
        "labels": [{"x": across(place), "shown": str(place + 1)} for place in places[::step]],
        "lines": [
            {
                "color": line.color,
                "dashes": line.dashes,
                "points": " ".join(f"{across(place)},{down(value)}" for place, value, _ in found),
                "dots": [
                    {"x": across(place), "y": down(value), "tooltip": tooltip}
                    for place, value, tooltip in found
                ],
            }
            for line, found in zip(lines, points, strict=True)
        ],
    }


def _means(line: Line, size: int) -> list[tuple[int, float, str]]:
    """Return the place, the mean and the tooltip of each `size` neighboring values of a line."""
    points = []
    for place in range(0, len(line.values), size):
        group = line.values[place : place + size]
        first, last = group[0][1], group[-1][1]
        where = f"round {first}" if first == last else f"mean of rounds {first} to {last}"
        value = fmean(value for value, _ in group)
        points.append((place, value, line.tooltip.format(where=where, value=value)))
    return points


def bar_chart(
    values: Mapping[str, float],
    shown: Callable[[float], str] = "{:,}".format,
    looks: Mapping[str, tuple[str, str]] | None = None,
    most: float | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of a bar chart from 0 to `most` (default: the largest value).

    Args:
        values: the values by name.
        shown: formats a value.
        looks: labels and colors of the rows that have some, by name.
        most: end of the axis.
    """
    top = most or max(values.values(), default=0.0) or 1.0
    found = looks or {}
    return [
        {
            "label": found[name][0] if name in found else name,
            "color": found[name][1] if name in found else None,
            "share": round(100 * value / top, 2),
            "shown": shown(value),
        }
        for name, value in values.items()
    ]
