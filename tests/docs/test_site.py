"""The documentation site builds without warnings, and looks right in a browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PAGES = ("index", "will-it-help", "concepts", "does-it-pay", "supported", "guides/gguf")
WIDE = "e => e.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 40))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    pytest.importorskip("sphinx_design", reason="needs the group docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(ROOT / "docs"), folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [390, 1280])
def test_s10_no_page_is_wider_than_the_screen(
    new_tab: Callable[..., Page], site: Path, name: str, width: int
) -> None:
    tab = new_tab(viewport={"width": width, "height": 900})
    tab.goto((site / f"{name}.html").as_uri())
    assert not tab.locator("html").evaluate_all(WIDE)
    if width == 1280:
        assert not tab.locator("article .table-wrapper").evaluate_all(WIDE)


@pytest.mark.parametrize(("scheme", "shown"), [("light", 0), ("dark", 1)])
def test_the_home_page_shows_the_picture_of_its_theme(
    new_tab: Callable[..., Page], site: Path, scheme: str, shown: int
) -> None:
    tab = new_tab(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    tab.goto((site / "index.html").as_uri())
    pictures = tab.locator("article img")
    assert [pictures.nth(at).is_visible() for at in range(2)] == [shown == at for at in range(2)]
    cards = tab.locator(".sd-card a")
    for at in range(cards.count()):
        address = cards.nth(at).get_attribute("href")
        assert (site / str(address)).is_file(), address


@pytest.mark.parametrize("word", ["Ollama", "GGUF", "vLLM", "PDF", "Chroma", "FAQ"])
def test_the_search_finds_the_page(new_tab: Callable[..., Page], site: Path, word: str) -> None:
    pages = {"Ollama": "gguf", "GGUF": "gguf", "vLLM": "migrate", "FAQ": "faq"}
    tab = new_tab()
    tab.goto(f"{(site / 'search.html').as_uri()}?q={word}")
    found = tab.locator("#search-results li a")
    found.first.wait_for()
    links = [str(found.nth(at).get_attribute("href")) for at in range(min(5, found.count()))]
    assert any(pages.get(word, "your-documents") in link for link in links), links
