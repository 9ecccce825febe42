"""A model folder that tests may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.models import Recipe, model, tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny Llama of two layers and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    model(Recipe(seed=5)).save_pretrained(folder)
    tokenizer("bytelevel").save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "spoiled"))
