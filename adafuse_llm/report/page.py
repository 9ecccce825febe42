"""A generation as HTML: the text with its owners, the candidates of every round, and the cost.

The HTML has no scripts and loads no fonts or images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from adafuse_llm.report import styles
from adafuse_llm.report.styles import AGREED, CHOSEN, FORCED, Look
from adafuse_llm.summary import Summary

if TYPE_CHECKING:
    from adafuse_llm.results import Generation

HERE = Path(__file__).parent

STROKES = ("solid", "dashed", "dotted", "double")
"""Line styles below spans. They distinguish members without color."""

TEMPLATES = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
"""The templates of this folder. They escape all inserted values."""


def fragment(generation: Generation) -> str:
    """Return a generation as HTML to put into another page, such as a notebook."""
    every, parts = styles.responses(generation), []
    for place, each in enumerate(every):
        title = styles.heading(place, generation) if len(every) > 1 else ""
        parts.append(_response(each, title=title, place=place))
    return f'<div class="adafuse">{"".join(parts)}</div>'


def _response(generation: Generation, *, title: str, place: int) -> str:
    names = styles.members_of(generation)
    members = [Shown(look) for look in styles.looks(names).values()]
    summary = Summary.of(generation.rounds)
    agreement = summary.agreement
    words = sum(len(decided.text.split()) for decided in generation.rounds)
    found = {styles.shared(decided) for decided in generation.rounds}
    usage = generation.usage
    columns = (
        usage.forward_passes,
        usage.tokens_processed,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
    )
    # one page can hold several responses
    content = f"{place}{generation.text}{len(generation.rounds)}{usage}"
    template = TEMPLATES.get_template("generation.jinja")
    return template.render(
        css="" if place else style(),
        heading=title,
        id="r" + hashlib.sha256(content.encode()).hexdigest()[:10],
        members=members,
        spans=_spans(generation, members),
        reasons=bool(generation.reasoning),
        shared=[
            {"text": str(each), "stroke": each.stroke}
            for each in (AGREED, CHOSEN, FORCED)
            if each in found or (each is AGREED and len(members) > 1 and CHOSEN not in found)
        ],
        chooses=any(decided.choice_probabilities for decided in generation.rounds),
        meaning=styles.meaning(generation.strategy, generation.rounds),
        summary=" · ".join(
            [
                count(summary.rounds, "round"),
                *([f"{summary.forced} forced"] if summary.forced else []),
                count(words, "word"),
                *([] if agreement is None else [f"all agreed in {agreement:.0%} of joint rounds"]),
                f"{summary.seconds:.2f} s",
                *styles.facts(generation),
            ]
        ),
        usage=[{"look": m, "numbers": [column[m.name] for column in columns]} for m in members],
    )


def count(number: int, thing: str) -> str:
    """Format a number with its noun: ``1 word``, ``2 words``."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


class Shown:
    """A member's look on a page."""

    def __init__(self, look: Look) -> None:
        self.name, self.mark = look.name, look.mark
        self.color = f"var(--color-{look.number % len(styles.COLORS)})"
        self.stroke = STROKES[look.number % len(STROKES)]


@cache
def palette() -> str:
    """Return the colors of all pages as CSS variables of the class ``adafuse``."""
    return (HERE / "palette.css").read_text(encoding="utf-8")


@cache
def style() -> str:
    """Return the style sheet of all reports, scoped to the class ``adafuse``."""
    return palette() + (HERE / "report.css").read_text(encoding="utf-8")


def _spans(generation: Generation, members: Sequence[Shown]) -> list[dict[str, Any]]:
    names = [member.name for member in members]
    by_name = {member.name: member for member in members}
    marks = {member.name: member.mark for member in members}
    left = generation.text
    reasoning = styles.reasoning_length(generation.text, generation.reply_prefix)
    spans = []
    for decided in generation.rounds:
        text, left = left[: len(decided.text)], left[len(decided.text) :]
        quiet, reasoning = text[:reasoning], max(0, reasoning - len(text))
        name = styles.owner(decided, names)
        look = by_name.get(name or "")
        joint = styles.shared(decided) or AGREED
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
                "stroke": look.stroke if look else joint.stroke,
                "decided_by": f"{look.mark} {look.name}" if look else joint.name,
                "forced": decided.forced,
                "chosen": joint is CHOSEN,
                "milliseconds": 1000 * decided.elapsed,
                "margins": "; ".join(f"{mark} {values}" for mark, values in margins.items()),
                "rows": styles.rows(decided, marks),
            }
        )
    return spans
