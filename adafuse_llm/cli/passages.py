"""Flags for documents, and how commands show the passages that they found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from adafuse_llm.documents import Passage, Retriever
from adafuse_llm.report.styles import printable

_HELP: Final = "Text, Markdown or PDF file, or a folder of such files. Repeatable."

Docs = Annotated[
    list[Path] | None,
    typer.Option(
        "--docs", metavar="PATH", help=f"{_HELP} The members read the best passages of them."
    ),
]
HandbookDocs = Annotated[
    list[Path] | None,
    typer.Option(
        "--docs",
        metavar="PATH",
        help=f"{_HELP} Default: the handbook of a fictional town, which ships with the package. "
        "For other documents, also pass --model: the embedded members know only this town.",
    ),
]
FollowLinks = Annotated[
    bool,
    typer.Option(
        "--follow-links", help="Also read files outside a folder that links in it point to."
    ),
]
Passages = Annotated[
    int,
    typer.Option("--passages", min=1, help="Number of passages of --docs that the members read."),
]


def show_sources(
    console: Console, retriever: Retriever, question: str, sources: Sequence[Passage]
) -> None:
    """Print the passages with their BM25 scores, and a hint if the best one fits badly."""
    console.print(Text("Sources", "bold"))
    for number, passage in enumerate(sources, start=1):
        excerpt = printable(" ".join(passage.text.replace("#", "").split()))
        line = Text(f"[{number}] {printable(passage.source)} ({passage.score:.1f}): ")
        console.print(line.append(excerpt, "dim"), no_wrap=True, overflow="ellipsis")
    missing = retriever.missing(question, sources[0])
    if missing:
        hint = (
            f"The best passage lacks most words of the question ({', '.join(missing)}), so the "
            "answer may not be in these documents."
        )
        console.print(Text(printable(hint), "yellow"))
