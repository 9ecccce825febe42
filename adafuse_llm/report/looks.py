"""Who a span belongs to, and how members, spans and numbers are told apart, wherever they are
shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from adafuse_llm.results import Candidate, FinishReason, Generation, Round
from adafuse_llm.summary import is_unanimous

COLORS = ("#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#d55e00", "#0072b2")
"""Of Okabe and Ito, which can be told apart without color vision and differ in lightness too."""

MARKS = "●■▲◆★▼"

ENDINGS: dict[FinishReason, str] = {
    "stop": "ended by the winner",
    "stop_sequence": "ended at a stop sequence",
    "length": "ended at a length limit",
    "cancelled": "interrupted",
}


@dataclass(frozen=True)
class Look:
    """How one member is shown: its name, its number from 0, a color and a mark."""

    name: str
    number: int

    @property
    def color(self) -> str:
        """One of `COLORS`."""
        return COLORS[self.number % len(COLORS)]

    @property
    def mark(self) -> str:
        """One of `MARKS`."""
        return MARKS[self.number % len(MARKS)]


def looks(members: Sequence[str]) -> dict[str, Look]:
    """A look for every member, by name."""
    return {name: Look(name, number) for number, name in enumerate(members)}


def members_of(generation: Generation) -> tuple[str, ...]:
    """The names of the members that decoded, in order."""
    return tuple(generation.usage.prompt_tokens)


def owner(decided: Round, members: Sequence[str]) -> str | None:
    """The member that what a round committed belongs to: of those that proposed it, or of all if
    none did, the one that finds it likeliest. None for a unanimous round.
    """
    if is_unanimous(decided):
        return None
    winner = decided.candidates[decided.winner]
    return min(winner.proposers or members, key=lambda name: winner.nll.get(name, float("inf")))


def quoted(candidate: Candidate) -> str:
    """A span with its spaces and newlines visible, and whether the text ends there."""
    text = json.dumps(candidate.text, ensure_ascii=False) if candidate.text else ""
    return f"{text} (end)".strip() if candidate.stops else text


def number(value: float | None) -> str:
    """Nats per token, or a dash where there is no score."""
    return "-" if value is None else f"{max(0.0, value):.3f}"  # no "-0.000"


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters become U+FFFD."""
    return "".join(c if c in "\n\t" or ord(c) >= 160 or " " <= c <= "~" else "\ufffd" for c in text)
