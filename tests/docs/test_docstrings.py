"""The examples in docstrings give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

MODULES = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "adafuse_llm").rglob("*.py"))
    if ">>>" in path.read_text("utf-8")
]


@pytest.mark.quick
@pytest.mark.parametrize("path", MODULES, ids=str)
def test_examples_in_docstrings_are_right(path: Path) -> None:
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    assert not doctest.testmod(module).failed
