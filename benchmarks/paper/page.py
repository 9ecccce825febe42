"""A report as one self-contained HTML page: tables, charts, no scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader

from adafuse_llm.report.charts import Bar, Point, Series, bar_chart, line_chart
from adafuse_llm.report.page import DASHES, color, count, environment, style, whole
from benchmarks.paper.layout import Kind
from benchmarks.paper.long import Lengths, Mean
from benchmarks.paper.report import Line, Report, Section, verdicts
from benchmarks.paper.sheets import Sheet, shares, sheets

HERE = Path(__file__).parent

SHADES = {"member": color(1), "peer": None, "adafuse": color(0)}
"""Colors of the bars by kind of row."""

ANALYSES = ("words", "lengths", "decisions", "sentences")
"""Tables and charts that belong to no section, in order."""


@cache
def _templates() -> Environment:
    """Load the templates of this folder and those of the package's reports."""
    shared = environment()
    assert shared.loader is not None
    return shared.overlay(loader=ChoiceLoader([FileSystemLoader(HERE), shared.loader]))


def suite_page(report: Report) -> str:
    """Return the whole page."""
    return whole("Does it pay?" if report.claims else "Tables and figures", _body(report))


def suite_charts(report: Report) -> str:
    """Return only the charts, to embed in another page."""
    return f'<div class="adafuse">{_body(report, only_charts=True)}</div>'


def _body(report: Report, *, only_charts: bool = False) -> str:
    absent = dict(report.absent)
    for section in report.sections:
        absent |= section.absent
    run = " · ".join(
        [
            f"suite {report.suite}",
            ", ".join(report.members),
            f"decoding took {report.time}",
            report.machine,
            f"{report.date[:10]}",
            f"adafuse-llm {report.version}",
        ]
    )
    return (
        _templates()
        .get_template("suite.jinja")
        .render(
            css=style(),
            heading=not only_charts,
            run=run,
            command=report.command,
            verdicts=[] if only_charts else verdicts(report),
            blocks=list(_blocks(report, only_charts)),
            traces=[] if only_charts else report.traces,
            absent={} if only_charts else absent,
        )
    )


def _blocks(report: Report, only_charts: bool) -> Iterator[dict[str, Any]]:
    """Yield the tables and charts of each part."""
    tables = [] if only_charts else sheets(report)
    for name in dict.fromkeys([*(s.name for s in report.sections), *ANALYSES]):
        section = report.section(name)
        own: list[Sheet] = [sheet for sheet in tables if sheet.section == name]
        yield {
            "sheets": own,
            "bars": [
                *(_bars(report, section) if section is not None and section.axis is None else ()),
                *(_words(report) if name == "words" else ()),
            ],
            "lines": [
                *(_lines(report, section) if section is not None else ()),
                *(_lengths(report) if name == "lengths" else ()),
            ],
        }


def _bars(report: Report, section: Section) -> Iterator[dict[str, Any]]:
    for task in report.tasks if section.lines else ():
        bars = [
            _time(line, task) if section.timed else _score(line, task) for line in section.lines
        ]
        yield {
            "caption": _caption(report, section, task),
            "rows": bar_chart(bars, None if section.timed else 100.0),
            "note": "Seconds per answer." if section.timed else _note(report, section, task),
        }


def _score(line: Line, task: str) -> Bar:
    cell, shade = line.cells[task], SHADES[line.kind]
    score, shown = cell.score, f"{cell.score.value:.1f}{cell.failures}"
    return Bar(line.name, score.value, shown, score.low, score.high, shade)


def _time(line: Line, task: str) -> Bar:
    seconds = line.cells[task].evaluation.latency
    return Bar(line.name, seconds, f"{seconds:.3f}", color=SHADES[line.kind])


def _lines(report: Report, section: Section) -> Iterator[dict[str, Any]]:
    """Yield one chart per task: the score over the part's axis, with one line per series."""
    if section.axis is None:
        return
    names = list(dict.fromkeys(line.series for line in section.lines))
    places = {line.at: f"{line.at:g}" for line in section.lines if line.at is not None}
    for task in report.tasks:
        series = [
            Series(
                [
                    _point(line, task)
                    for line in section.lines
                    if line.series == name and line.at is not None
                ],
                color(place),
                DASHES[place],
                name,
            )
            for place, name in enumerate(names)
        ]
        yield {
            "caption": _caption(report, section, task),
            "chart": _score_chart(series, places, section.axis),
            "note": _note(report, section, task),
        }


def _score_chart(
    series: list[Series], labels: Mapping[float, str], axis: str
) -> dict[str, Any] | None:
    """Return a line chart of scores. Its vertical axis ends at multiples of ten around them."""
    points = [point for line in series for point in line.points]
    lows = [point.y if point.low is None else point.low for point in points]
    highs = [point.y if point.high is None else point.high for point in points]
    return line_chart(
        series,
        least=max(0.0, 10 * ((min(lows) - 1) // 10)) if lows else 0.0,
        most=min(100.0, 10 * (max(highs) // 10 + 1)) if highs else None,
        labels=labels,
        axis=axis,
    )


def _point(line: Line, task: str) -> Point:
    cell = line.cells[task]
    score, label = cell.score, f"{line.name}: {cell.score.shown()}{cell.failures}"
    return Point(line.at or 0.0, score.value, label, score.low, score.high)


def _lengths(report: Report) -> Iterator[dict[str, Any]]:
    """Yield one chart per task: the score by length of the reference, with a line per system."""
    if report.long is None:
        return
    for task, lengths in report.long.lengths.items():
        series = [
            Series(
                [_mean_point(place, name, mean) for place, mean in enumerate(lengths.means[name])],
                color(number),
                DASHES[number % len(DASHES)],
                name,
            )
            for number, name in enumerate(_chosen(report, lengths))
        ]
        places = {float(place): each.words for place, each in enumerate(lengths.bins)}
        yield {
            "caption": f"Score by length of the reference answer ({task})",
            "chart": _score_chart(series, places, "words of the reference answer"),
            "note": "Mean score in percent with its 95 % interval: the best member, the best peer "
            f"and AdaFuse, {count(sum(each.questions for each in lengths.bins), 'question')}.",
        }


def _chosen(report: Report, lengths: Lengths) -> list[str]:
    """Return the names of the best member, the best peer and all rows of AdaFuse."""
    lines = {line.name: line.kind for table in report.tables for line in table.lines}

    def named(of: Kind) -> list[str]:
        return [name for name, kind in lines.items() if kind == of and name in lengths.means]

    best = [max(named(kind), key=lengths.overall, default=None) for kind in ("member", "peer")]
    return [*(name for name in best if name is not None), *named("adafuse")]


def _mean_point(place: int, name: str, mean: Mean) -> Point:
    low, high = mean.bounds or (None, None)
    return Point(place, mean.value, f"{name}: {mean.shown()}", low, high)


def _words(report: Report) -> Iterator[dict[str, Any]]:
    for task, systems in report.words.items():
        for name, rounds in systems.items():
            sizes = sorted(rounds)
            bars = [
                Bar(count(size, "word"), share, f"{share:.1f} %")
                for size, share in zip(sizes, shares(rounds, sizes), strict=True)
            ]
            yield {
                "caption": f"Words per round: {name}, {task}",
                "rows": bar_chart(bars, 100.0),
                "note": "",
            }


def _note(report: Report, section: Section, task: str) -> str:
    metric, questions = report.tasks[task].replace("_", " "), section.questions[task]
    return f"{metric} in percent, 95 % interval, {count(questions, 'question')}."


def _caption(report: Report, section: Section, task: str) -> str:
    return f"{section.title} ({task})" if len(report.tasks) > 1 else section.title
