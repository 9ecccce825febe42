"""How members, spans and numbers look in all displays, and which member owns a span."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adafuse_llm.results import Candidate, FinishReason, Generation, Round
from adafuse_llm.summary import is_unanimous

COLORS = ("#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#d55e00", "#0072b2")
"""Colors by Okabe and Ito, which color-blind readers can distinguish. They differ in lightness."""

MARKS = "●■▲◆★▼○□△◇☆▽"

ENDINGS: dict[FinishReason, str] = {
    "stop": "ended by the winner",
    "stop_sequence": "ended at a stop sequence",
    "length": "ended at a length limit",
    "cancelled": "interrupted",
}


@dataclass(frozen=True)
class Look:
    """The look of one member: its name, its number from 0, a color and a mark."""

    name: str
    number: int

    @property
    def color(self) -> str:
        """The member's color, one of `COLORS`."""
        return COLORS[self.number % len(COLORS)]

    @property
    def mark(self) -> str:
        """The member's mark: one of `MARKS`, with a number if there are more members than marks."""
        turn, place = divmod(self.number, len(MARKS))
        return MARKS[place] + (str(turn + 1) if turn else "")


def looks(members: Sequence[str]) -> dict[str, Look]:
    """Return a look for every member, by name."""
    return {name: Look(name, number) for number, name in enumerate(members)}


def proposed_by(candidate: Candidate, marks: Mapping[str, str]) -> str:
    """Return the marks of the members that proposed a span, or "all" if all of several did.

    Args:
        candidate: the span.
        marks: the mark of every member that decoded, by name.
    """
    if len(marks) > 1 and set(candidate.proposers) == set(marks):
        return "all"
    return " ".join(marks[name] for name in candidate.proposers) or "-"


def members_of(generation: Generation) -> tuple[str, ...]:
    """Return the names of the members that decoded, in order."""
    return tuple(generation.usage.prompt_tokens)


def owner(decided: Round, members: Sequence[str]) -> str | None:
    """Return the member that owns the text which a round committed; None for a unanimous round.

    The owner is the proposer that finds the text most likely. If the text has no proposers, the
    owner is the member that finds it most likely.
    """
    if is_unanimous(decided):
        return None
    winner = decided.candidates[decided.winner]
    return min(winner.proposers or members, key=lambda name: winner.nll.get(name, float("inf")))


def quoted(candidate: Candidate) -> str:
    """Return a span in quotes, with escaped newlines. Mark it if the response ends after it."""
    text = json.dumps(candidate.text, ensure_ascii=False) if candidate.text else ""
    return f"{text} (end)".strip() if candidate.stops else text


def number(value: float | None) -> str:
    """Format a score in nats per token. Return a dash if there is no score."""
    return "-" if value is None else f"{max(0.0, value):.3f}"  # avoids "-0.000"


def printable(text: str) -> str:
    """Replace control characters by U+FFFD, because they could control a terminal."""
    return "".join(c if c in "\n\t" or ord(c) >= 160 or " " <= c <= "~" else "\ufffd" for c in text)
