"""Links between the pages, READMEs and notebooks of the repository lead somewhere.

Sphinx checks the links within the site. This also checks what GitHub shows: paths of files and the
headings that anchors name. Links to other sites are not checked, because tests run offline.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.generated import REPOSITORY
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"^\s*(`{3,}|~{3,})(.*)$")
LINK = re.compile(r"\]\(<?([^()\s>]+(?:\([^()\s]*\))?)>?(?:\s+\"[^\"]*\")?\)")
READMES = sorted((ROOT / "integrations").glob("*/README.md"))
GENERATED = re.compile(r"^(cookbooks|site)/")
"""Pages that only the site has: copies of the cookbooks."""

PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(path for path in DOCS.rglob("*.md") if "cookbooks" not in path.parts[len(DOCS.parts) :]),
        *READMES,
        *(ROOT / "cookbooks").glob("*.md"),
        *(ROOT / "cookbooks").glob("*.ipynb"),
        *(ROOT / "adafuse_llm").rglob("*.md"),
    }
)

pytestmark = pytest.mark.quick


@cache
def prose(page: Path) -> str:
    """The Markdown of a page without its code."""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    else:
        text = page.read_text(encoding="utf-8")
    return re.sub(r"`[^`\n]+`", "``", "\n".join(_without_code(text)))


def _without_code(text: str) -> Iterator[str]:
    """Yield the lines outside of fenced blocks."""
    fence = ""
    for line in text.splitlines():
        found = FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence) and not found[2].strip():
            fence = ""
        elif not fence:
            yield line


def links(page: Path) -> list[str]:
    """The targets of a page's links that are in the repository, absolute ones as absolute paths."""
    found = [
        link.replace(f"{REPOSITORY}/blob/main", str(ROOT)) for link in LINK.findall(prose(page))
    ]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = page.read_text(encoding="utf-8") if page.suffix == ".md" else ""
    seen: Counter[str] = Counter()
    names = set()
    for line in _without_code(text):
        if heading := re.match(r"#{1,6}\s+(.*)", line):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            names.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return frozenset(names)


def problem(page: Path, link: str) -> str | None:
    """What is wrong with a link, or None."""
    path, _, anchor = link.partition("#")
    target = page if not path else (page.parent / path).resolve()
    if page.is_relative_to(DOCS) and path and not target.exists():
        relative = (page.parent / path).resolve().relative_to(DOCS).as_posix()
        if GENERATED.match(relative):  # a page of the site
            name = relative.removeprefix("cookbooks/")
            return None if (ROOT / "cookbooks" / f"{name}.ipynb").exists() else "no such cookbook"
    if not target.exists():
        return "no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return f"no such heading; it has {', '.join(sorted(anchors(target)))}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = {link: said for link in links(page) if (said := problem(page, link))}
    assert wrong == {}


def test_the_first_page_leads_to_every_page_and_reads_well_on_github() -> None:
    first = DOCS / "index.md"
    linked = {(first.parent / link.partition("#")[0]).resolve() for link in links(first)}
    guides = [page for page in PAGES if page.parent in (DOCS, DOCS / "guides")]
    assert {*guides} - linked == {first}
    assert [page.name for page in guides if "```{" in page.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.parent.name)
def test_links_of_an_integration_also_lead_there_from_a_package_index(readme: Path) -> None:
    found = LINK.findall(prose(readme))
    assert len(found) > 2
    assert [link for link in found if not link.startswith(f"{REPOSITORY}/blob/main/")] == []
