"""`adafuse decide`: answer a typed question about a text with probabilities."""

from __future__ import annotations

import sys
from argparse import Namespace

from rich.bar import Bar
from rich.table import Table

from adafuse_llm import AdaFuseConfig, Choice, InvalidInputError, Predicate, Score
from adafuse_llm.cli.ask import EMBEDDED
from adafuse_llm.cli.common import Command, Parser, Setup
from adafuse_llm.cli.terminal import print_json, stderr_console, stdout_console, tell
from adafuse_llm.decisions import DecideOptions, Question, state_text
from adafuse_llm.evaluation.files import read_text
from adafuse_llm.report.styles import looks, percent, printable


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    parser.add_argument("question", metavar="QUESTION", help="Question about the state.")
    parser.flag("--state FILE", "Text that the question is about. Default: that of stdin.")
    parser.flag("--choice TEXT", "Option of the answer. Repeatable.")
    parser.flag("--level TEXT", "Level of a scale, upwards. Repeatable.")
    parser.flag(
        "--orders N",
        "Maximum number of orders in which members read the options. Default: all rotations of up "
        "to four options; for more, one order and its reverse.",
    )
    parser.flag("--json", "Print one JSON object.")


def decide(setup: Setup, flags: Namespace) -> int:
    """Answer a question about a text with the probability of each option.

    Without --choice and --level, the options are yes and no.
    """
    question = _question(flags)
    options: DecideOptions = {"orders": flags.orders}
    if any(each.partition("=")[0].strip() == "weights" for each in flags.options):
        options["weights"] = setup.file.weights  # which override a calibration in --config
    if flags.state is None and sys.stdin.isatty():
        raise InvalidInputError("pass --state FILE, or send a text to stdin")
    state = sys.stdin.read() if flags.state is None else read_text(flags.state)
    state = state_text(state.rstrip("\r\n"), "the state")  # without the line break of files
    if setup.is_embedded:
        tell(EMBEDDED)
    with setup.load() as engine, stderr_console().status("reading the text"):
        decision = engine.decide(state, {"question": question}, **options)
    answer = decision["question"]
    for warning in answer.warnings:
        tell(warning)
    if flags.json:
        answered = {"question": flags.question, "answer": answer.choice, **answer.model_dump()}
        print_json({**answered, **decision.model_dump(exclude={"answers"})})
        return 0
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for option in question.options:
        likely = answer.probabilities[option]
        table.add_row(printable(option), "together", Bar(1, 0, likely, width=30), percent(likely))
        for name, look in looks([*answer.members]).items():
            own = answer.members[name][option]
            bar = Bar(1, 0, own, width=30, color=look.color)
            table.add_row("", printable(str(look)), bar, percent(own))
    line = f"{printable(answer.choice)}, with confidence {percent(answer.confidence)}"
    if isinstance(question, Score):
        line += f"; expected level {answer.score:.2f}, from 0 to {len(question.options) - 1}"
    console = stdout_console()
    console.print(printable(flags.question), "", table, "", line, sep="\n")
    if answer.is_sure is False:
        console.print("It is below the threshold of the calibration: ask a person.")
    return 0


def _question(flags: Namespace) -> Question:
    if flags.choice and flags.level:
        raise InvalidInputError("pass either --choice, for options, or --level, for a scale")
    if flags.choice:
        return Choice(flags.question, flags.choice)
    return Score(flags.question, flags.level) if flags.level else Predicate(flags.question)


COMMAND = Command(
    decide,
    add_flags,
    "QUESTION",
    unused={"strategy", *AdaFuseConfig.model_fields} - DecideOptions.__annotations__.keys(),
)
