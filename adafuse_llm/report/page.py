"""A generation as HTML: the text with its owners, the candidates of every round, and the cost.

The HTML has no scripts and loads no fonts or images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from adafuse_llm.report import styles
from adafuse_llm.report.styles import AGREED, CHOSEN, FORCED

if TYPE_CHECKING:
    from adafuse_llm.results import Generation

HERE = Path(__file__).parent

PALETTE = (HERE / "palette.css").read_text(encoding="utf-8")
"""The colors of all pages as CSS variables of the class ``adafuse``."""

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
    members = list(styles.looks(styles.members_of(generation)).values())
    kinds = {styles.shared(decided) for decided in generation.rounds}
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
        css="" if place else PALETTE + (HERE / "report.css").read_text(encoding="utf-8"),
        heading=title,
        id="r" + hashlib.sha256(content.encode()).hexdigest()[:10],
        members=members,
        spans=list(_spans(generation)),
        reasons=bool(generation.reasoning),
        shared=[
            each
            for each in (AGREED, CHOSEN, FORCED)
            if each in kinds or (each is AGREED and len(members) > 1 and CHOSEN not in kinds)
        ],
        chooses=CHOSEN in kinds,
        meaning=styles.meaning(generation.strategy, generation.rounds),
        summary=" · ".join(styles.summary(generation)),
        usage=[{"look": m, "numbers": [column[m.name] for column in columns]} for m in members],
    )


def _spans(generation: Generation) -> Iterator[dict[str, Any]]:
    looks = styles.looks(styles.members_of(generation))
    marks = {name: look.mark for name, look in looks.items()}
    left = generation.text
    reasoning = styles.reasoning_length(generation.text, generation.reply_prefix)
    for decided in generation.rounds:
        text, left = left[: len(decided.text)], left[len(decided.text) :]
        quiet, reasoning = text[:reasoning], max(0, reasoning - len(text))
        margins = {
            marks[member]: ", ".join(f"{value:.2f}" for value in values)
            for member, values in decided.margins.items()
            if values
        }
        yield {
            "reasoning": quiet,
            "text": text[len(quiet) :],
            "round": decided.index,
            "look": styles.look_of(decided, looks),
            "forced": decided.forced,
            "chosen": decided.choice_probabilities is not None,
            "milliseconds": 1000 * decided.elapsed,
            "margins": "; ".join(f"{mark} {values}" for mark, values in margins.items()),
            "rows": styles.rows(decided, marks),
        }
