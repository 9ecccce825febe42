"""The flags for documents, the search in them, and how commands show what they found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from adafuse_llm.cli.common import Parser
from adafuse_llm.cli.terminal import tell
from adafuse_llm.documents import Passage, Retriever, read_documents
from adafuse_llm.report.styles import printable

EMBEDDED = (
    "The embedded members know only the fictional town of the handbook. For anything else, use "
    "your own models: --model PATH_OR_ID --model PATH_OR_ID"
)
"""What `ask` and `chat` print if the embedded members answer."""


def add_documents(parser: Parser, default: str = "") -> None:
    """Add the flags that `search_in` reads."""
    text = "Text, Markdown or PDF file, or a folder of such files, from which the members answer."
    parser.flag("--docs PATH", f"{text} Repeatable.{default}")
    parser.flag("--passages N", "Largest number of passages that the members read.", default=3)


def search_in(docs: Sequence[Path]) -> Retriever:
    """Return a search over the passages of documents. Skipped files are named on stderr."""
    return Retriever(read_documents(docs, on_skip=tell))


def show_sources(console: Console, sources: Sequence[Passage]) -> None:
    """Print the passages with their BM25 scores."""
    console.print(Text("Sources", "bold"))
    if not any(passage.score for passage in sources):
        console.print("No passage has a word of the question, so the members read the first ones.")
    for number, passage in enumerate(sources, start=1):
        excerpt = printable(" ".join(passage.text.replace("#", "").split()))
        line = Text(f"[{number}] {printable(passage.source)} ({passage.score:.1f}): ")
        console.print(line.append(excerpt, "dim"), no_wrap=True, overflow="ellipsis")
