"""`adafuse report`: summarize the answers, the cost and the decisions of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from adafuse_llm import InvalidInputError
from adafuse_llm.cli.common import Setup
from adafuse_llm.cli.terminal import check_page, print_json, stdout_console, write_page
from adafuse_llm.evaluation.metrics import Metric, load_metric
from adafuse_llm.report.run import Answer, Marks, RunSummary, read_results, run_page
from adafuse_llm.report.styles import printable


def report(
    setup: Setup,  # noqa: ARG001  # every command takes a setup
    *,
    results: Annotated[
        Path,
        typer.Argument(
            help="File that `adafuse run --rounds` or `adafuse eval --rounds` wrote.",
            exists=True,
            dir_okay=False,
        ),
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric that decides whether an answer is right, such as exact_match, verbatim or "
            "number. Default: the main metric of `adafuse eval`, otherwise exact_match."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Summarize a run: accuracy, words per round, agreement, and rounds and cost by member.

    A member backs a round if it proposed the committed span. It decides the round if no other
    member proposed this span. Accuracy is known if the test set has answers. Of several responses
    to a line (`adafuse run --n`), only the first one counts.
    """
    check_page(html)
    lines = read_results(results)
    marks = _marks(lines, metric)
    summary = RunSummary.of(lines, marks)
    if html is not None:
        write_page(html, run_page(lines, title=f"Run {results.name}", marks=marks))
    if as_json:
        print_json(summary.model_dump(mode="json"))
    else:
        stdout_console().print(_figures(summary), "", _members(summary), sep="\n")
    return 0


def _marks(lines: Sequence[Answer], name: str | None) -> Marks | None:
    """Return which answers are right, or None if that is not known.

    It is not known if no line has a label, or if the default metric gives partial scores.

    Args:
        lines: the answers.
        name: name of the metric that decides. Default: the first recorded metric, otherwise
            exact_match.

    Raises:
        InvalidInputError: the named metric does not exist, or it gives partial scores.
    """
    labeled = [line for line in lines if line.accepted]
    chosen = name or next((each for line in labeled for each in line.metrics), "exact_match")
    if all(chosen in line.metrics for line in labeled):
        scores = {line.line: line.metrics[chosen] for line in labeled}
    else:
        metric = load_metric(chosen)
        scores = {line.line: _score(line, metric) for line in labeled}
    if set(scores.values()) <= {0.0, 100.0}:
        right = {number: score == 100 for number, score in scores.items()}
        return Marks(chosen, right) if right else None
    if name is None:
        return None
    raise InvalidInputError(
        f"--metric {name} gives partial scores; choose a metric by which an answer is right or "
        "wrong, such as exact_match, verbatim or number"
    )


def _score(line: Answer, metric: Metric) -> float:
    if line.error is not None:
        return 0.0
    answer = line.pred if line.answer is None else line.answer
    return metric.score(metric.statistics(answer, line.accepted))


def _figures(summary: RunSummary) -> Table:
    decided, seconds = summary.decisions, summary.seconds_per_answer
    words = (f"{size}: {rounds}" for size, rounds in decided.words_per_round.items())
    rows = {
        "answers": f"{summary.answers} ({summary.failed} failed)",
        **({} if summary.accuracy is None else {"accuracy": str(summary.accuracy)}),
        "rounds": f"{decided.rounds}{f' ({decided.forced} forced)' if decided.forced else ''}",
        "words per round": ", ".join(words),
        "agreement": "-" if decided.agreement is None else f"{decided.agreement:.0%} of rounds",
        "seconds per answer": ", ".join(f"{k} {v:.2f}" for k, v in seconds.items()),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, "bold"), Text(printable(value)))
    return table


def _members(summary: RunSummary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("member", overflow="fold")
    for column in ("backed", "decided", "passes", "tokens processed"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, cost in summary.cost.items():
        counts = (
            summary.decisions.backed.get(name, 0),
            summary.decisions.decided.get(name, 0),
            cost.forward_passes,
            cost.tokens_processed,
        )
        table.add_row(printable(name), *(f"{number:,}" for number in counts))
    return table
