"""A generation as HTML: the text with its owners, the candidates of every round, and charts.

The HTML has no scripts and loads no fonts or images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from adafuse_llm.report.charts import Point, Series, bar_chart, line_chart
from adafuse_llm.report.styles import (
    AGREED,
    CHOSEN,
    COLORS,
    FORCED,
    Look,
    drawn,
    ending,
    heading,
    looks,
    meaning,
    members_of,
    number,
    number_of,
    owner,
    percent,
    proposed_by,
    quoted,
    ranked,
    reasoning_length,
    responses,
    shared,
)
from adafuse_llm.results import Generation, Round
from adafuse_llm.summary import Summary, choice_probabilities

HERE = Path(__file__).parent

STROKES = ("solid", "dashed", "dotted", "double")
DASHES = ("", "7 3", "2 3", "10 3 2 3", "5 2", "1 4", "10 3 2 3 2 3")
"""Line styles below spans and in charts. They distinguish members without color."""


STROKES_OF_SHARED = {AGREED: "double", CHOSEN: "solid", FORCED: "dotted"}
"""Line styles below spans that belong to no single member. These lines have no color."""

OPTIONS = 20
"""Maximum number of options in the chart of probabilities."""

POINTS = 60
"""Maximum number of points of a line. Longer lines show means of neighboring values."""


@cache
def environment() -> Environment:
    """Return the Jinja environment of this folder's templates. It escapes all inserted values."""
    loader = FileSystemLoader(HERE)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined)


def fragment(generation: Generation) -> str:
    """Return a generation as HTML to put into another page, such as a notebook."""
    return f'<div class="adafuse">{_body(generation)}</div>'


def page(
    generation: Generation,
    *,
    title: str = "Ensemble response",
    alone: Mapping[str, str] | None = None,
    sources: Iterable[tuple[str, str]] = (),
) -> str:
    """Return a generation as one self-contained HTML page.

    Args:
        generation: the response with its rounds.
        title: heading of the page, such as the question.
        alone: the response that each member gives alone, by member.
        sources: names and texts of the passages that the members read.
    """
    of_member = looks(members_of(generation))
    template = environment().get_template("page.jinja")
    return template.render(
        title=title,
        body=_body(generation),
        alone=[(Shown(of_member[name]), text) for name, text in (alone or {}).items()],
        sources=list(sources),
        version=version("adafuse-llm"),
    )


def _body(generation: Generation) -> str:
    """Return the HTML of all responses: the first one, and the alternatives below headings."""
    every = responses(generation)
    titles = [heading(place, generation) if len(every) > 1 else "" for place in range(len(every))]
    return "".join(
        _response(each, title=title, place=place)
        for place, (title, each) in enumerate(zip(titles, every, strict=True))
    )


def _response(generation: Generation, *, title: str, place: int) -> str:
    """Return the HTML of one response.

    Args:
        generation: the response. Its alternatives are ignored.
        title: heading of the response; "" for no heading.
        place: index of the response in its generation.
    """
    names = members_of(generation)
    members = [Shown(look) for look in looks(names).values()]
    summary = Summary.of(generation.rounds)
    words = sum(len(decided.text.split()) for decided in generation.rounds)
    template = environment().get_template("generation.jinja")
    return template.render(
        css="" if place else style(),
        heading=title,
        id=_identity(generation, place),
        members=members,
        spans=_spans(generation, members),
        reasons=bool(generation.reasoning),
        shared=_legend(generation, members),
        options=_options(generation.rounds),
        meaning=meaning(generation.strategy, generation.rounds),
        summary=" · ".join(
            [
                count(summary.rounds, "round"),
                *([f"{summary.forced} forced"] if summary.forced else []),
                count(words, "word"),
                f"{summary.seconds:.2f} s",
                *([f"strategy {generation.strategy}"] if generation.strategy else []),
                *drawn(generation),
                ending(generation),
            ]
        ),
        figures=figures(summary, members),
        points=POINTS,
        margins=_margins(generation.rounds, members),
        seconds=line_chart([_seconds(generation.rounds)]),
        usage=_usage(generation, members),
    )


def figures(summary: Summary, members: Sequence[Shown]) -> dict[str, Any]:
    """Return the data for a summary's charts: words per round, rounds by member, agreement."""
    asked = {m.name: summary.asked.get(m.name, 0) for m in members}
    words = {count(n, "word"): rounds for n, rounds in summary.words_per_round.items()}
    return {
        "words": bars(words),
        "asked": bars(asked, members) if len({*asked.values()}) > 1 else (),
        "backed": bars({m.name: summary.backed.get(m.name, 0) for m in members}, members),
        "decided": bars({m.name: summary.decided.get(m.name, 0) for m in members}, members),
        "agreement": "-" if summary.agreement is None else f"{summary.agreement:.0%}",
    }


def bars(values: Mapping[str, float], members: Sequence[Shown] = ()) -> list[dict[str, Any]]:
    """Return the rows of a bar chart. A row with a member's name has the member's color."""
    shown = {member.name: member for member in members}
    return bar_chart(
        [
            (f"{shown[name].mark} {name}", value, f"{value:,}", shown[name].color)
            if name in shown
            else (name, value, f"{value:,}", None)
            for name, value in values.items()
        ]
    )


def count(number: int, thing: str) -> str:
    """Format a number with its noun: ``1 word``, ``2 words``."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


class Shown:
    """A member's look with its line styles for charts and spans."""

    def __init__(self, look: Look) -> None:
        self.name, self.mark = look.name, look.mark
        self.color = f"var(--color-{look.number % len(COLORS)})"
        self.stroke = STROKES[look.number % len(STROKES)]
        self.dashes = DASHES[look.number % len(DASHES)]


@cache
def palette() -> str:
    """Return the colors of all pages as CSS variables of the class ``adafuse``."""
    return (HERE / "palette.css").read_text(encoding="utf-8")


@cache
def style() -> str:
    """Return the style sheet of all reports, scoped to the class ``adafuse``."""
    return palette() + (HERE / "report.css").read_text(encoding="utf-8")


def _identity(generation: Generation, place: int) -> str:
    """Return an ID prefix for a response's elements, so that one page can hold several."""
    content = f"{place}{generation.text}{len(generation.rounds)}{generation.usage}"
    return "r" + hashlib.sha256(content.encode()).hexdigest()[:10]


def _spans(generation: Generation, members: Sequence[Shown]) -> list[dict[str, Any]]:
    """Return the part of the text that each round committed, with facts about the round.

    The last parts may be shorter than the committed texts, because a stop sequence cut off the end.
    """
    names = [member.name for member in members]
    by_name = {member.name: member for member in members}
    marks = {member.name: member.mark for member in members}
    left = generation.text
    reasoning = reasoning_length(generation.text, generation.reply_prefix)
    spans = []
    for decided in generation.rounds:
        text, left = left[: len(decided.text)], left[len(decided.text) :]
        quiet, reasoning = text[:reasoning], max(0, reasoning - len(text))
        name = owner(decided, names)
        look = by_name.get(name or "")
        joint = shared(decided) or AGREED
        probabilities = choice_probabilities(decided)
        margins = {
            marks[member]: ", ".join(f"{value:.2f}" for value in values)
            for member, values in decided.margins.items()
            if values
        }
        spans.append(
            {
                "reasoning": quiet,
                "text": text[len(quiet) :],
                "round": decided.index,
                "mark": look.mark if look else joint.mark,
                "color": look.color if look else "var(--quiet)",
                "stroke": look.stroke if look else STROKES_OF_SHARED[joint],
                "decided_by": f"{look.mark} {look.name}" if look else joint.name,
                "forced": decided.forced,
                "chosen": probabilities is not None,
                "milliseconds": 1000 * decided.elapsed,
                "margins": "; ".join(f"{mark} {values}" for mark, values in margins.items()),
                "rows": [
                    {
                        "text": quoted(candidate),
                        "won": index == decided.winner,
                        "nll": [number_of(decided, candidate, name) for name in names],
                        "score": number(candidate.score),
                        "last": proposed_by(candidate, marks)
                        if probabilities is None
                        else percent(probabilities[index]),
                    }
                    for index, candidate in ranked(decided)
                ],
            }
        )
    return spans


def _legend(generation: Generation, members: Sequence[Shown]) -> list[dict[str, str]]:
    """Return the legend of the spans that belong to no single member."""
    found = {shared(decided) for decided in generation.rounds}
    return [
        {"text": str(each), "stroke": stroke}
        for each, stroke in STROKES_OF_SHARED.items()
        if each in found or (each is AGREED and len(members) > 1 and CHOSEN not in found)
    ]


def _options(rounds: Sequence[Round]) -> dict[str, Any] | None:
    """Return a chart of the probabilities of given texts, or None if no round chose among them."""
    for decided in rounds:
        if (probabilities := choice_probabilities(decided)) is not None:
            found = ranked(decided)
            best = [(each.text, probabilities[index]) for index, each in found[:OPTIONS]]
            bars = [(text, value, percent(value), None) for text, value in best]
            return {"rows": bar_chart(bars, most=1.0), "hidden": len(found) - len(bars)}
    return None


def _usage(generation: Generation, members: Sequence[Shown]) -> list[dict[str, Any]]:
    usage = generation.usage
    columns = (
        usage.forward_passes,
        usage.tokens_processed,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
    )
    return [{"look": m, "numbers": [column[m.name] for column in columns]} for m in members]


def _margins(rounds: Sequence[Round], members: Sequence[Shown]) -> dict[str, Any] | None:
    """Return a chart with a line per member: its margin at each word that it considered."""
    margins = {
        member.name: [
            (margin, decided.index)
            for decided in rounds
            for margin in decided.margins.get(member.name, ())
        ]
        for member in members
    }
    size = _size(max(map(len, margins.values()), default=0))
    return line_chart(
        [
            Series(
                [
                    Point(place, value, f"{member.name}, {where}: {value:.2f}")
                    for place, value, where in _means(margins[member.name], size)
                ],
                member.color,
                member.dashes,
            )
            for member in members
        ],
        most=1.0,
    )


def _seconds(rounds: Sequence[Round]) -> Series:
    seconds = [(decided.elapsed, decided.index) for decided in rounds]
    means = _means(seconds, _size(len(seconds)))
    return Series([Point(place, value, f"{where}: {value:.3f} s") for place, value, where in means])


def _size(values: int) -> int:
    """Return how many neighboring values a chart joins to show at most `POINTS` points."""
    return max(1, -(-values // POINTS))


def _means(values: Sequence[tuple[float, int]], size: int) -> Iterator[tuple[int, float, str]]:
    """Yield the place, the mean value and the rounds of each `size` neighboring values.

    Args:
        values: values with the numbers of their rounds.
        size: number of values to join.
    """
    for place in range(0, len(values), size):
        group = values[place : place + size]
        first, last = group[0][1], group[-1][1]
        where = f"round {first}" if first == last else f"mean of rounds {first} to {last}"
        yield place, fmean(value for value, _ in group), where
