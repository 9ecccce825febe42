"""Documents in several formats, with texts of the handbook, for guides that read documents."""

from __future__ import annotations

import html
from pathlib import Path

from adafuse_llm.embedded import handbook_path

LINE = 90
"""Maximum number of characters in a line of a PDF file."""


def put_documents(folder: Path) -> None:
    """Write a PDF, an HTML and a Markdown file."""
    folder.mkdir(exist_ok=True)
    (folder / "museum.pdf").write_bytes(pdf(_text("jalith-museum")))
    body = f"<h1>Silesse Mill</h1><p>{html.escape(_text('silesse-mill'))}</p>"
    page = f"<html><head><title>Silesse Mill</title></head><body>{body}</body></html>"
    (folder / "mill.html").write_text(page, encoding="utf-8")
    festival = (handbook_path() / "brenax-festival.md").read_text(encoding="utf-8")
    (folder / "festival.md").write_text(festival, encoding="utf-8")


def _text(name: str) -> str:
    """Return the text of a page of the handbook, without its heading."""
    lines = (handbook_path() / f"{name}.md").read_text(encoding="utf-8").splitlines()
    return " ".join(line for line in lines if not line.startswith("#"))


def pdf(text: str) -> bytes:
    """Return a PDF file with one page of text, without compression."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > LINE:
            lines.append("")
        lines[-1] += f"{word} "
    escaped = [line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)") for line in lines]
    shown = "".join(f"({line}) Tj T*\n" for line in escaped)
    content = f"BT /F1 10 Tf 14 TL 50 780 Td\n{shown}ET".encode("latin-1")
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    data, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return data + trailer % (len(objects) + 1, start)
