"""Every block of Python in README and docs runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from adafuse_llm.embedded import member_paths
from tests.support.paths import ROOT

PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})
MODEL = re.compile(r'"((?:[\w.-]+/)+[\w.-]+|model-\d)"')
"""How the pages name models: these become the embedded members."""


def examples(page: Path) -> Document:
    return Sybil([PythonCodeBlockParser(), SkipParser()], path=str(ROOT)).parse(page)


@pytest.mark.quick
def test_there_are_pages_with_code() -> None:
    assert sum(bool(list(examples(page).examples())) for page in PAGES) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch) -> None:
    blocks = list(examples(page).examples())
    names = dict.fromkeys(MODEL.findall(page.read_text(encoding="utf-8")))
    for number, name in enumerate(names):
        folder = tmp_path / name
        if not folder.exists() and not name.endswith((".md", ".html", ".jsonl")):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.symlink_to(member_paths()[number % 3], target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        block.evaluate()


def test_s2_the_guide_to_decisions_shows_what_its_code_prints(tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / "guides" / "decisions.md"
    monkeypatch.chdir(tmp_path)
    for block in examples(page).examples():
        block.evaluate()
    printed = capsys.readouterr().out
    outputs = re.findall(r"```\n\n```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(outputs) == 2
    for output in outputs:
        assert output in printed
        assert not re.search(r"(.)\1{9}", output), "the members repeat themselves"
