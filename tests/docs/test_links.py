"""Links between pages, READMEs and notebooks lead somewhere, on GitHub as on the site."""

import json
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin

from docs.generated import REPOSITORY
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
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


MARKDOWN = MarkdownIt("gfm-like", {"linkify": False}).use(anchors_plugin, max_level=6)


@cache
def parsed(page: Path) -> list[Token]:
    """The parts of a page, those of its paragraphs included."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        markdown = ("".join(each["source"]) for each in cells if each["cell_type"] == "markdown")
        text = "\n\n".join(markdown)
    tokens = MARKDOWN.parse(text)
    return [*tokens, *(child for token in tokens for child in token.children or ())]


def links(page: Path) -> list[str]:
    """All links of a page, those to other sites included."""
    found = (token.attrGet("href") or token.attrGet("src") for token in parsed(page))
    return [unquote(str(link)) for link in found if link]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    return {str(each.attrGet("id")) for each in parsed(page) if each.type == "heading_open"}


def problem(page: Path, link: str) -> str | None:
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


def test_every_link_leads_somewhere() -> None:
    here = [
        (page, each) for page in PAGES for each in links(page) if not re.match(r"[a-z]+:", each)
    ]
    assert len(here) > 100
    wrong = {(page, link): said for page, link in here if (said := problem(page, link))}
    assert wrong == {}


def test_the_first_page_leads_to_every_page_and_reads_well_on_github() -> None:
    first = DOCS / "index.md"
    linked = {(first.parent / link.partition("#")[0]).resolve() for link in links(first)}
    guides = [page for page in PAGES if page.parent in (DOCS, DOCS / "guides")]
    assert {*guides} - linked == {first}
    assert [page.name for page in guides if "```{" in page.read_text(encoding="utf-8")] == []


def test_links_of_an_integration_also_lead_there_from_a_package_index() -> None:
    for readme in READMES:
        found = links(readme)
        assert len(found) > 2
        assert [each for each in found if not each.startswith(f"{REPOSITORY}/blob/main/")] == []
