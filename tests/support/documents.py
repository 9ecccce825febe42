"""Documents in several formats, with texts of the handbook, for guides that read documents."""

import html
import textwrap
from pathlib import Path

from reportlab.pdfgen.canvas import Canvas  # type: ignore[import-untyped]

from adafuse_llm.embedded import handbook_path


def put_documents(folder: Path) -> None:
    """Write a PDF, an HTML and a Markdown file."""
    folder.mkdir(exist_ok=True)
    canvas = Canvas(str(folder / "museum.pdf"))
    lines = canvas.beginText(50, 780)
    lines.textLines(textwrap.wrap(_text("jalith-museum"), 90))
    canvas.drawText(lines)
    canvas.save()
    body = f"<h1>Silesse Mill</h1><p>{html.escape(_text('silesse-mill'))}</p>"
    page = f"<html><head><title>Silesse Mill</title></head><body>{body}</body></html>"
    (folder / "mill.html").write_text(page, encoding="utf-8")
    festival = (handbook_path() / "brenax-festival.md").read_text(encoding="utf-8")
    (folder / "festival.md").write_text(festival, encoding="utf-8")


def _text(name: str) -> str:
    """Return the text of a page of the handbook, without its heading."""
    lines = (handbook_path() / f"{name}.md").read_text(encoding="utf-8").splitlines()
    return " ".join(line for line in lines if not line.startswith("#"))
