"""Display members, spans and rounds in a terminal, with and without color."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from adafuse_llm.report import styles
from adafuse_llm.report.styles import AGREED, FORCED, Look, Shared, printable

if TYPE_CHECKING:
    from adafuse_llm.results import Generation, Round

TYPES = ("", "underline", "italic", "bold", "", "")
"""Text styles of members, in order. The first four members also differ without color."""

JOINT, QUIET, REASONING = "bold", "dim", "dim italic"
"""Styles of text that several members chose together, of forced text, and of reasoning."""


class Display:
    """Shows an ensemble's decisions. With `forced`, the legend explains forced text, too."""

    def __init__(
        self, members: Sequence[str], console: Console, strategy: str = "", *, forced: bool = False
    ) -> None:
        self.members = tuple(members)
        self.console = console
        self._strategy = strategy
        self._forced = forced
        self._looks = styles.looks(self.members)

    def legend(self) -> Text:
        """Return one line: the names of members and of kinds of shared text, in their styles."""
        shown: list[Look | Shared] = [*self._looks.values()]
        if len(self.members) > 1:
            shown.append(AGREED)
        if self._forced:
            shown.append(FORCED)
        return Text("   ").join(map(_name, shown))

    def span(self, text: str, decided: Round, reasoning: int = 0) -> Text:
        """Return text of a round in the style of its owner.

        Its first `reasoning` characters have the style `REASONING` instead.
        """
        if reasoning:
            rest = text[reasoning:]
            quiet = Text(printable(text[:reasoning]), REASONING)
            return quiet.append_text(self.span(rest, decided)) if rest else quiet
        return Text(printable(text), _style(styles.look_of(decided, self._looks)))

    def response(self, generation: Generation) -> list[Text]:
        """Return the parts of a response: the reasoning, and the answer in the owners' styles."""
        reasoning = styles.reasoning_length(generation.text, generation.reply_prefix)
        answer, start = Text(), 0
        for decided in generation.rounds:
            end = start + len(decided.text)
            if end > reasoning:
                answer.append_text(self.span(generation.text[max(start, reasoning) : end], decided))
            start = end
        if not generation.reasoning:
            return [answer]
        reasoned = Text(printable(generation.reasoning), REASONING)
        return [Text("Reasoning", "bold"), reasoned, Text(), Text("Answer", "bold"), answer]

    def rounds(self, rounds: Sequence[Round]) -> Group:
        """Return a table of rounds, and below it what their scores mean.

        A row has a round's index, owner, winner, winner's score and runner-up. If the round did not
        ask all members, its row names the others instead of the runner-up.
        """
        table = Table.grid(padding=(0, 2))
        for justify in ("right", "left", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True, overflow="ellipsis")
        for decided in rounds:
            winner = decided.candidates[decided.winner]
            look = styles.look_of(decided, self._looks)
            text = styles.quoted(winner)
            if len(decided.text) < len(winner.text):  # a length limit has cut it
                text += " (cut)"
            asked = decided.asked or self.members
            others = ", ".join(printable(name) for name in self.members if name not in asked)
            table.add_row(
                str(decided.index),
                _name(look),
                Text(text, _style(look)),
                "" if decided.forced else styles.number(winner.score),
                Text(f"not asked: {others}" if others else _preferred_to(decided), "dim"),
            )
        means = styles.meaning(self._strategy, rounds)
        return Group(table, Text(f"{means['symbol']}: {means['score']} Lower is better.", "dim"))

    def alone(self, answers: Mapping[str, str]) -> Table:
        """Return a table of the answers that members give alone, by member."""
        table = Table.grid(padding=(0, 2))
        for name, answer in answers.items():
            table.add_row(_name(self._looks[name]), Text(printable(answer)))
        return table

    def summary(self, generation: Generation, seconds: float | None = None) -> Text:
        """Return a line of statistics and costs. `seconds` defaults to the time of the rounds."""
        passes = generation.usage.forward_passes
        cost = f"forward passes: {', '.join(f'{name} {passes[name]}' for name in self.members)}"
        return Text(printable(" · ".join([*styles.summary(generation, seconds), cost])), "dim")


def shown(generation: Generation, console: Console) -> Iterator[RenderableType]:
    """Yield a legend, and for each response of a generation its text, rounds and costs."""
    responses = (generation, *generation.alternatives)
    forced = any(decided.forced for each in responses for decided in each.rounds)
    members = tuple(generation.usage.prompt_tokens)
    display = Display(members, console, generation.strategy, forced=forced)
    yield display.legend()
    for number, each in enumerate(responses, start=1):
        yield Text()
        if len(responses) > 1:
            seed = "" if each.seed is None else f" · seed {each.seed}"
            yield Text(f"Response {number} of {len(responses)}{seed}", "bold")
        yield from display.response(each)
        yield Text()
        yield display.rounds(each.rounds)
        yield Text()
        yield display.summary(each)


def _style(look: Look | Shared) -> str:
    if isinstance(look, Look):
        return f"{look.color} {TYPES[look.number % len(TYPES)]}".strip()
    return QUIET if look is FORCED else JOINT


def _name(look: Look | Shared) -> Text:
    return Text(printable(str(look)), _style(look))


def _preferred_to(decided: Round) -> str:
    """Return the runner-up and its score, or for ``choices`` its and the winner's probability."""
    probabilities = decided.choice_probabilities
    others = [
        (candidate.score, index)
        for index, candidate in enumerate(decided.candidates)
        if index != decided.winner and candidate.score is not None
    ]
    won = "" if probabilities is None else styles.percent(probabilities[decided.winner])
    if not others:
        return won
    score, index = min(others)
    shown = styles.number(score) if probabilities is None else styles.percent(probabilities[index])
    return f"{won} over {styles.quoted(decided.candidates[index])} {shown}".strip()
