"""How members, spans and rounds look on a terminal, with and without colour."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adafuse_llm import Candidate, Generation, Round
from adafuse_llm.cli.common import printable

STYLES = ("#56b4e9", "#e69f00 underline", "#cc79a7 italic", "#009e73 bold", "#d55e00", "#0072b2")
"""Colours of Okabe and Ito, which differ in lightness too; neighbours also differ in type."""

MARKS = "●■▲◆★▼"
AGREED = "bold"

ENDINGS = {
    "stop": "ended by the winner",
    "stop_sequence": "ended at a stop sequence",
    "length": "ended at a length limit",
    "cancelled": "interrupted",
}


class Display:
    """The looks of one ensemble.

    A span belongs to the member that is surest of it among those that proposed it; where the
    members proposed nothing else, to all.

    Args:
        members: their names, in order.
        console: where they will be shown.
    """

    def __init__(self, members: Sequence[str], console: Console) -> None:
        self.members = tuple(members)
        self.console = console
        self._brackets = console.is_terminal and (console.no_color or not console.color_system)
        initials = [name[0] for name in self.members]
        if len(set(initials)) < len(initials):
            initials = [str(number) for number in range(1, len(initials) + 1)]
        self._initials = dict(zip(self.members, initials, strict=True))

    def owner(self, decided: Round) -> str | None:
        """The member that what a round committed belongs to; None where all agreed."""
        if self.agreed(decided):
            return None
        winner = decided.candidates[decided.winner]
        return min(winner.proposers, key=lambda name: winner.nll.get(name, float("inf")))

    def agreed(self, decided: Round) -> bool:
        """Whether several members proposed one and the same span, and nothing else."""
        proposers = decided.candidates[decided.winner].proposers
        return len(decided.candidates) == 1 and len(proposers) == len(self.members) > 1

    def style(self, member: str | None) -> str:
        """The style of a member's spans."""
        if member is None:
            return AGREED
        return STYLES[self.members.index(member) % len(STYLES)]

    def name(self, member: str | None) -> Text:
        """A member's mark and name; those of agreement for None."""
        if member is None:
            return Text("= all agree", AGREED)
        mark = MARKS[self.members.index(member) % len(MARKS)]
        initial = f"{self._initials[member]}: " if self._brackets else ""
        return Text(f"{mark} {initial}{printable(member)}", self.style(member))

    def legend(self) -> Text:
        """Which style is whose."""
        owners = (*self.members, *([None] if len(self.members) > 1 else []))
        return Text("   ").join(self.name(owner) for owner in owners)

    def span(self, text: str, decided: Round) -> Text:
        """Text that a round released, in the style of its owner."""
        owner = self.owner(decided)
        if not self._brackets or owner is None or not text.strip():
            return Text(printable(text), self.style(owner))
        start = len(text) - len(text.lstrip())
        return Text(printable(f"{text[:start]}[{self._initials[owner]}:{text[start:]}]"))

    def rounds(self, rounds: Sequence[Round]) -> Table:
        """A line per round: who decided what, and what it was preferred to."""
        table = Table.grid(padding=(0, 2))
        for justify in ("right", "left", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True, overflow="ellipsis")
        for decided in rounds:
            winner = decided.candidates[decided.winner]
            owner = self.owner(decided)
            table.add_row(
                str(decided.index + 1),
                self.name(owner),
                Text(quoted(winner), self.style(owner)),
                number(winner.score),
                Text(_preferred_to(decided), "dim"),
            )
        return table

    def trace(self, decided: Round) -> Table:
        """Everything about one round: its candidates and what every member thinks of them."""
        table = Table(title=f"round {decided.index + 1}", title_justify="left", title_style="bold")
        table.add_column("")
        table.add_column("candidate", overflow="fold")
        for member in self.members:
            table.add_column(self.name(member), justify="right", overflow="fold")
        table.add_column("F", justify="right")
        table.add_column("proposed by", overflow="fold")
        for index, candidate in enumerate(decided.candidates):
            won = index == decided.winner
            table.add_row(
                ">" if won else "",
                Text(quoted(candidate)),
                *(number(candidate.nll.get(member)) for member in self.members),
                number(candidate.score),
                Text(", ".join(candidate.proposers)),
                style="bold" if won else None,
            )
        return table

    def summary(self, generation: Generation, seconds: float) -> Text:
        """What a decode took, in one line."""
        rounds = generation.rounds
        agreed = sum(self.agreed(decided) for decided in rounds)
        words = sum(len(decided.text.split()) for decided in rounds)
        passes = generation.usage.forward_passes
        parts = [
            f"{len(rounds)} {'round' if len(rounds) == 1 else 'rounds'}",
            f"{words / max(1, len(rounds)):.1f} words per round",
            *([f"all agreed in {agreed} of {len(rounds)}"] if len(self.members) > 1 else []),
            f"forward passes: {', '.join(f'{name} {passes[name]}' for name in self.members)}",
            f"{seconds:.1f} s",
            ENDINGS[generation.finish_reason],
        ]
        return Text(printable(" · ".join(parts)), "dim")


def quoted(candidate: Candidate) -> str:
    """A span with its spaces and newlines visible, and whether the text ends there."""
    text = printable(json.dumps(candidate.text, ensure_ascii=False)) if candidate.text else ""
    return f"{text} (end)".strip() if candidate.stops else text


def number(value: float | None) -> str:
    """Nats per token, or a dash where there is no score."""
    return "-" if value is None else f"{max(0.0, value):.3f}"  # no "-0.000"


def _preferred_to(decided: Round) -> str:
    """The best other candidate of a round."""
    others = [
        (candidate.score, index)
        for index, candidate in enumerate(decided.candidates)
        if index != decided.winner and candidate.score is not None
    ]
    if not others:
        return ""
    score, index = min(others)
    return f"over {quoted(decided.candidates[index])} {number(score)}"
