"""How members, spans and rounds look on a terminal, with and without color."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from adafuse_llm.report import looks
from adafuse_llm.report.looks import printable
from adafuse_llm.results import Candidate, Generation, Round
from adafuse_llm.summary import is_unanimous

TYPES = ("", "underline", "italic", "bold", "", "")
"""Neighbours differ in type besides color."""

AGREED = "bold"


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
        self._looks = looks.looks(self.members)
        self._brackets = console.is_terminal and (console.no_color or not console.color_system)
        initials = [name[0] for name in self.members]
        if len(set(initials)) < len(initials):
            initials = [str(number) for number in range(1, len(initials) + 1)]
        self._initials = dict(zip(self.members, initials, strict=True))

    def owner(self, decided: Round) -> str | None:
        """The member that what a round committed belongs to; None for a unanimous round."""
        return looks.owner(decided, self.members)

    def style(self, member: str | None) -> str:
        """The style of a member's spans."""
        if member is None:
            return AGREED
        look = self._looks[member]
        return f"{look.color} {TYPES[look.number % len(TYPES)]}".strip()

    def name(self, member: str | None) -> Text:
        """A member's mark and name; those of agreement for None."""
        if member is None:
            return Text("= all agree", AGREED)
        mark = self._looks[member].mark
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
                looks.number(winner.score),
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
                *(looks.number(candidate.nll.get(member)) for member in self.members),
                looks.number(candidate.score),
                Text(", ".join(candidate.proposers)),
                style="bold" if won else None,
            )
        return table

    def summary(self, generation: Generation, seconds: float | None = None) -> Text:
        """What a decode took, in one line. Without `seconds` it is the time of the rounds."""
        if seconds is None:
            seconds = sum(decided.elapsed for decided in generation.rounds)
        rounds = generation.rounds
        agreed = sum(map(is_unanimous, rounds))
        words = sum(len(decided.text.split()) for decided in rounds)
        passes = generation.usage.forward_passes
        parts = [
            f"{len(rounds)} {'round' if len(rounds) == 1 else 'rounds'}",
            f"{words / max(1, len(rounds)):.1f} words per round",
            *([f"all agreed in {agreed} of {len(rounds)}"] if len(self.members) > 1 else []),
            f"forward passes: {', '.join(f'{name} {passes[name]}' for name in self.members)}",
            f"{seconds:.1f} s",
            looks.ENDINGS[generation.finish_reason],
        ]
        return Text(printable(" · ".join(parts)), "dim")


def shown(generation: Generation, console: Console) -> Iterator[RenderableType]:
    """A generation in the looks of its members: the text, the rounds, what they took."""
    display = Display(looks.members_of(generation), console)
    text, left = Text(), generation.text
    for decided in generation.rounds:
        part, left = left[: len(decided.text)], left[len(decided.text) :]
        text.append_text(display.span(part, decided))
    yield display.legend()
    yield Text()
    yield text
    yield Text()
    yield display.rounds(generation.rounds)
    yield Text()
    yield display.summary(generation)


def quoted(candidate: Candidate) -> str:
    """A span as a terminal can show it."""
    return printable(looks.quoted(candidate))


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
    return f"over {quoted(decided.candidates[index])} {looks.number(score)}"
