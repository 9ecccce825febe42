"""The generated tables in the pages are those that the code makes now."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generated import PLACE, filled, pages
from tests.support.paths import ROOT

GENERATED = [page for page in pages() if PLACE.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_its_tables_and_they_are_not_stale(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert any("| " in found[0] for found in PLACE.finditer(text))
    assert text == filled(text), "run: python -m docs.generated"
