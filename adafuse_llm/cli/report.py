"""`adafuse report`: summarize the cost and the decisions of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from adafuse_llm.cli.common import Setup, check_page, print_json, stdout_console, write_page
from adafuse_llm.report.run import RunSummary, read_results, run_page
from adafuse_llm.report.styles import printable


def report(
    setup: Setup,  # noqa: ARG001  # every command takes a setup
    *,
    results: Annotated[
        Path,
        typer.Argument(help="File that `adafuse run --rounds` wrote.", exists=True, dir_okay=False),
    ],
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Summarize a run: words per round, wins, agreement, time and cost by member."""
    check_page(html)
    lines = read_results(results)
    summary = RunSummary.of(lines)
    if html is not None:
        write_page(html, run_page(lines, title=f"Run {results.name}"))
    if as_json:
        print_json(summary.model_dump(mode="json"))
    else:
        stdout_console().print(_table(summary))
    return 0


def _table(summary: RunSummary) -> Table:
    decided, seconds = summary.decisions, summary.seconds_per_answer
    words = (f"{size}: {rounds}" for size, rounds in decided.words_per_round.items())
    rows = {
        "answers": f"{summary.answers} ({summary.failed} failed)",
        "rounds": str(decided.rounds),
        "words per round": ", ".join(words),
        "wins": ", ".join(f"{name} {wins}" for name, wins in decided.wins.items()),
        "agreement": "-" if decided.agreement is None else f"{decided.agreement:.0%} of rounds",
        "seconds per answer": ", ".join(f"{k} {v:.2f}" for k, v in seconds.items()),
        "forward passes": ", ".join(f"{k} {v.forward_passes}" for k, v in summary.cost.items()),
        "tokens processed": ", ".join(f"{k} {v.tokens_processed}" for k, v in summary.cost.items()),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, "bold"), Text(printable(value)))
    return table
