"""Members, spans and rounds in a terminal, with and without color."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from adafuse_llm.report import styles
from adafuse_llm.report.styles import printable
from adafuse_llm.results import Candidate, Generation, Round
from adafuse_llm.summary import is_unanimous

TYPES = ("", "underline", "italic", "bold", "", "")
"""Text styles by member. Neighboring members differ in style as well as in color."""

AGREED = "bold"


class Display:
    """A display of one ensemble's decisions.

    A span belongs to the proposer that finds it most likely. The span of a unanimous round belongs
    to all members.

    Args:
        members: the members' names, in order.
        console: the console that prints the display.
    """

    def __init__(self, members: Sequence[str], console: Console) -> None:
        self.members = tuple(members)
        self.console = console
        self._looks = styles.looks(self.members)
        self._brackets = console.is_terminal and (console.no_color or not console.color_system)
        initials = [name[0] for name in self.members]
        if len(set(initials)) < len(initials):
            initials = [str(number) for number in range(1, len(initials) + 1)]
        self._initials = dict(zip(self.members, initials, strict=True))

    def owner(self, decided: Round) -> str | None:
        """Return the member that owns the text of a round, or None if the round is unanimous."""
        return styles.owner(decided, self.members)

    def style(self, member: str | None) -> str:
        """Return the style of a member's spans."""
        if member is None:
            return AGREED
        look = self._looks[member]
        return f"{look.color} {TYPES[look.number % len(TYPES)]}".strip()

    def name(self, member: str | None) -> Text:
        """Return a member's mark and name, or the words for agreement if `member` is None."""
        if member is None:
            return Text("= all agree", AGREED)
        mark = self._looks[member].mark
        initial = f"{self._initials[member]}: " if self._brackets else ""
        return Text(f"{mark} {initial}{printable(member)}", self.style(member))

    def legend(self) -> Text:
        """Return a line that shows each member's style."""
        owners = (*self.members, *([None] if len(self.members) > 1 else []))
        return Text("   ").join(self.name(owner) for owner in owners)

    def span(self, text: str, decided: Round) -> Text:
        """Return a round's text in the style of its owner."""
        owner = self.owner(decided)
        if not self._brackets or owner is None or not text.strip():
            return Text(printable(text), self.style(owner))
        start = len(text) - len(text.lstrip())
        return Text(printable(f"{text[:start]}[{self._initials[owner]}:{text[start:]}]"))

    def rounds(self, rounds: Sequence[Round]) -> Table:
        """Return a table of rounds: the owner, the winner, its score and the runner-up of each."""
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
                styles.number(winner.score),
                Text(_preferred_to(decided), "dim"),
            )
        return table

    def trace(self, decided: Round) -> Table:
        """Return a table of one round in detail: the candidates and their scores by member.

        Marks stand for the members. :meth:`legend` explains them.
        """
        marks = {member: self._looks[member].mark for member in self.members}
        table = Table(
            title=f"round {decided.index + 1}",
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 1, 0, 0),
        )
        table.add_column("")
        table.add_column("candidate", overflow="fold")
        for member in self.members:
            header = Text(marks[member], self.style(member))
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("F", justify="right", no_wrap=True)
        table.add_column("proposed by")
        for index, candidate in enumerate(decided.candidates):
            won = index == decided.winner
            table.add_row(
                ">" if won else "",
                Text(quoted(candidate)),
                *(styles.number(candidate.nll.get(member)) for member in self.members),
                styles.number(candidate.score),
                styles.proposed_by(candidate, marks),
                style="bold" if won else None,
            )
        return table

    def summary(self, generation: Generation, seconds: float | None = None) -> Text:
        """Return the cost of a decode in one line. `seconds` defaults to the time of the rounds."""
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
            styles.ENDINGS[generation.finish_reason],
        ]
        return Text(printable(" · ".join(parts)), "dim")


def shown(generation: Generation, console: Console) -> Iterator[RenderableType]:
    """Yield the parts of a generation for display: legend, text, rounds and cost."""
    display = Display(styles.members_of(generation), console)
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
    """Return a quoted span that is safe to print in a terminal."""
    return printable(styles.quoted(candidate))


def _preferred_to(decided: Round) -> str:
    """Describe the runner-up of a round: the best candidate that did not win."""
    others = [
        (candidate.score, index)
        for index, candidate in enumerate(decided.candidates)
        if index != decided.winner and candidate.score is not None
    ]
    if not others:
        return ""
    score, index = min(others)
    return f"over {quoted(decided.candidates[index])} {styles.number(score)}"
