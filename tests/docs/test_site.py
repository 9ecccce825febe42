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

PAGES = ("index", "does-it-pay", "guides/gguf")
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
def test_no_page_is_wider_than_the_screen(
    new_tab: Callable[..., Page], site: Path, name: str, width: int
) -> None:
    tab = new_tab(viewport={"width": width, "height": 900})
    tab.goto((site / f"{name}.html").as_uri())
    assert not tab.locator("html").evaluate_all(WIDE)
    if width == 1280:
        assert not tab.locator("article .table-wrapper").evaluate_all(WIDE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_follow_the_switch_of_the_site(
    new_tab: Callable[..., Page], site: Path, scheme: str
) -> None:
    tab = new_tab(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    tab.goto((site / "does-it-pay.html").as_uri())
    switch = tab.locator(".theme-toggle:visible").first
    color = "e => getComputedStyle(e).backgroundColor"
    papers = []
    for _ in range(3):
        theme = tab.locator("body").get_attribute("data-theme")
        papers.append((theme, tab.locator(".adafuse").first.evaluate(color)))
        switch.click()
    seen = dict(papers)
    assert set(seen) == {"auto", "light", "dark"}
    assert seen["light"] == "rgb(255, 255, 255)"
    assert seen["dark"] == "rgb(21, 24, 28)"
    assert seen["auto"] == seen[scheme]
