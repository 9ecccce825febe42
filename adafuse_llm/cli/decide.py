"""`adafuse decide`: answer a typed question about a text with probabilities."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from adafuse_llm import AdaFuseConfig, Choice, InvalidInputError, Predicate, Score
from adafuse_llm.cli.ask import EMBEDDED
from adafuse_llm.cli.common import Command, Parser, Setup
from adafuse_llm.cli.terminal import print_json, stderr_console, stdout_console, tell
from adafuse_llm.decisions import DecideOptions, Question
from adafuse_llm.report import styles
from adafuse_llm.report.styles import printable
from adafuse_llm.results import Answer

BAR = 30
"""Width of a bar for the probability 1, in characters."""


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    parser.add_argument("question", metavar="QUESTION", help="Question about the state.")
    parser.flag(
        "--state FILE",
        "What the question is about: a text, or a JSON file. - reads a text from stdin.",
        default=Path("-"),
    )
    parser.flag("--choice TEXT", "Option of the answer. Repeatable.", action="append", default=[])
    parser.flag(
        "--level TEXT", "Level of a scale, upwards. Repeatable.", action="append", default=[]
    )
    parser.flag("--json", "Print one JSON object.")


def decide(setup: Setup, flags: Namespace) -> int:
    """Answer a question about a text with the probability of each option.

    Without --choice and --level, the answer is yes or no.
    """
    question, state = _question(flags), _state(flags.state)
    if setup.is_embedded:
        tell(EMBEDDED)
    with setup.load() as engine, stderr_console().status("reading the text"):
        decision = engine.decide(state, {"the question": question})
    (answer,) = decision.values()
    for warning in answer.warnings:
        tell(warning)
    if flags.json:
        shown = {"question": flags.question, "answer": answer.choice, **answer.model_dump()}
        usage = decision.usage.model_dump()
        print_json({**shown, "strategy": decision.strategy, "usage": usage})
        return 0
    console = stdout_console()
    console.print(Text(printable(flags.question), "bold"), "", sep="\n")
    console.print(_bars(question, answer), "", sep="\n")
    line = f"{printable(answer.choice)}, with confidence {styles.percent(answer.confidence)}"
    if isinstance(question, Score):
        line += f"; expected level {answer.score:.2f}, from 0 to {len(question.options) - 1}"
    console.print(Text(line, "bold"))
    if answer.is_sure is False:
        console.print("It is below the threshold of the calibration: ask a person.")
    return 0


def _question(flags: Namespace) -> Question:
    if flags.choice and flags.level:
        raise InvalidInputError("pass either --choice, for options, or --level, for a scale")
    if flags.choice:
        return Choice(flags.question, flags.choice)
    return Score(flags.question, flags.level) if flags.level else Predicate(flags.question)


def _state(path: Path) -> Any:
    if path == Path("-") and sys.stdin.isatty():
        raise InvalidInputError("pass --state FILE, or send a text to stdin")
    data = sys.stdin.buffer.read() if path == Path("-") else path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
        return json.loads(text) if path.suffix == ".json" else text
    except ValueError as error:
        raise InvalidInputError(f"--state {path} cannot be read: {error}") from error


def _bars(question: Question, answer: Answer) -> Table:
    """Return the probability of each option, of the ensemble and then of each member."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    looks = styles.looks([*answer.members])
    for option in question.options:
        probability = answer.probabilities[option]
        row = Bar(1, 0, probability, width=BAR)
        table.add_row(Text(printable(option), "bold"), "together", row, styles.percent(probability))
        for name, look in looks.items():
            own = answer.members[name][option]
            row = Bar(1, 0, own, width=BAR, color=look.color)
            table.add_row("", Text(printable(str(look)), look.color), row, styles.percent(own))
    return table


COMMAND = Command(
    decide,
    add_flags,
    "QUESTION",
    unused=AdaFuseConfig.model_fields.keys() - DecideOptions.__annotations__.keys(),
)
