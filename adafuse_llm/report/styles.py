"""How displays show members, spans and numbers, and which member a span belongs to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adafuse_llm.summary import Summary
from adafuse_llm.text.reasoning import split_reasoning

if TYPE_CHECKING:
    from adafuse_llm.results import Candidate, FinishReason, Generation, Round

COLORS = ("#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#d55e00", "#0072b2")
"""Colors by Okabe and Ito, which color-blind readers can tell apart."""

MARKS = "●■▲◆★▼○□△◇☆▽"

STROKES = ("solid", "dashed", "dotted", "double")
"""Styles of the line below a span on the server's page. They tell members apart without color."""


@dataclass(frozen=True)
class Shared:
    """The look of text that no member owns: its mark, the line below it, its name in the legend."""

    kind: str
    mark: str
    stroke: str
    name: str

    def __str__(self) -> str:
        return f"{self.mark} {self.name}"


AGREED = Shared("agreed", "=", "double", "all agree")
FORCED = Shared("forced", "–", "dotted", "forced by the grammar")  # noqa: RUF001  # a dash hardly stands out
CHOSEN = Shared("chosen", "»", "solid", "chosen by score")

ENDINGS: dict[FinishReason, str] = {
    "stop": "finished",
    "stop_sequence": "ended at a stop sequence",
    "length": "ended at a length limit",
    "cancelled": "interrupted",
}


MEANINGS = json.loads(Path(__file__).with_name("meanings.json").read_text(encoding="utf-8"))
"""By strategy: what members' numbers and candidates' scores mean. All displays use these texts."""


def meaning(strategy: str, rounds: Sequence[Round] = ()) -> dict[str, str]:
    """Return the `MEANINGS` of a strategy, or those of `choices` if a round chose among them."""
    if any(decided.choice_probabilities for decided in rounds):
        return dict(MEANINGS["choices"])
    strategy = "adafuse" if strategy == "single" else strategy
    return dict(MEANINGS.get(strategy, MEANINGS["other"]))


@dataclass(frozen=True)
class Look:
    """The look of one member: its name, its number from 0, a color and a mark."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.mark} {self.name}"

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


def count(number: int, thing: str) -> str:
    """Format a number with its noun: ``1 word``, ``2 words``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def summary(generation: Generation, seconds: float | None = None) -> list[str]:
    """Return the statistics, strategy, confidence and ending of a response as short texts.

    `seconds` defaults to the time of the rounds.
    """
    rounds = generation.rounds
    totals = Summary.of(rounds)
    parts = [count(totals.rounds, "round")]
    if totals.forced:
        parts[0] += f", {totals.forced} forced"
    free = totals.words_per_round
    words = sum(size * times for size, times in free.items())
    parts.append(f"{words / max(1, sum(free.values())):.1f} words per round")
    agreed = [each for decided in rounds if (each := decided.is_unanimous) is not None]
    if agreed:
        parts.append(f"all agreed in {sum(agreed)} of {len(agreed)} where several proposed")
    parts.append(f"{totals.seconds if seconds is None else seconds:.1f} s")
    known = {
        "strategy": generation.strategy or None,
        "log-probability": None if generation.logprob is None else f"{generation.logprob:.1f}",
        "confidence": None if generation.confidence is None else percent(generation.confidence),
        "seed": generation.seed,
    }
    parts += [f"{name} {value}" for name, value in known.items() if value is not None]
    by_grammar = generation.finish_reason == "stop" and rounds and rounds[-1].forced
    ended_by = "the grammar" if by_grammar else generation.cut_by
    return [*parts, f"ended by {ended_by}" if ended_by else ENDINGS[generation.finish_reason]]


def reasoning_length(text: str, prefix: str = "") -> int:
    """Return the length of the reasoning at the beginning of a reply, including its markers.

    `prefix` is what the chat templates wrote before `text`.
    """
    _, answer = split_reasoning(text, prefix)
    return len(text) - len(answer)


def shared(decided: Round) -> Shared | None:
    """Return the look of a round's text if no single member owns it, or else None."""
    if decided.forced:
        return FORCED
    if decided.choice_probabilities is not None:
        return CHOSEN
    return AGREED if decided.is_unanimous else None


def owner(decided: Round, members: Sequence[str]) -> str | None:
    """Return the member that owns the text of a round; None if the text is `shared`.

    The owner is the proposer that finds the text most likely. If the text has no proposers, the
    owner is the member that finds it most likely.
    """
    if shared(decided) is not None:
        return None
    winner = decided.candidates[decided.winner]
    return min(
        winner.proposers or members, key=lambda name: winner.nll.get(name, math.inf), default=None
    )


def look_of(decided: Round, looks: Mapping[str, Look]) -> Look | Shared:
    """Return the look of a round's text: that of its owner, or the `shared` one."""
    name = owner(decided, tuple(looks))
    return looks[name] if name is not None else shared(decided) or AGREED


def quoted(candidate: Candidate) -> str:
    """Return a candidate's `printable` span in quotes, with "(end)" if it ends the response."""
    text = printable(json.dumps(candidate.text, ensure_ascii=False)) if candidate.text else ""
    return f"{text} (end)".strip() if candidate.ends else text


def number(value: float | None) -> str:
    """Format a score in nats. Negative scores become 0, and None a dash."""
    return "-" if value is None else f"{max(0.0, value):.3f}"  # avoids "-0.000"


def percent(probability: float) -> str:
    """Format a probability as a percentage with one decimal."""
    return f"{100 * probability:.1f} %"


def printable(text: str) -> str:
    """Replace control characters, which could control a terminal, by U+FFFD."""
    return "".join(c if c in "\n\t" or ord(c) >= 160 or " " <= c <= "~" else "\ufffd" for c in text)
