"""`make quick` touches every module, and has tests of every folder."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGES = (
    ROOT / "adafuse_llm",
    ROOT / "benchmarks",
    ROOT / "training",
    ROOT / "integrations/langchain-adafuse/langchain_adafuse",
    ROOT / "integrations/llama-index-llms-adafuse/llama_index/llms/adafuse",
)
DISTRIBUTIONS = ROOT / "integrations"
OPTIONAL = {
    *("bm25s", "lm_eval", "matplotlib", "optuna", "pandas", "prometheus_client"),
    *("rich", "sacrebleu", "starlette", "uvicorn"),
}
"""Packages of the extras, and those that only benchmarks need."""


def modules() -> list[str]:
    return list(_modules())


def _modules() -> Iterator[str]:
    for package in PACKAGES:
        base = ROOT
        if package.is_relative_to(DISTRIBUTIONS):
            base = DISTRIBUTIONS / package.relative_to(DISTRIBUTIONS).parts[0]
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", modules())
def test_a_module_can_be_imported(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if not _is_optional(error):
            raise
        pytest.skip(str(error))
    assert module.__name__ == name
    assert module.__doc__


def _is_optional(error: BaseException | None) -> bool:
    """Whether a package of an extra or of a benchmark is missing."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            missing = (error.name or "").partition(".")[0]
            return missing in OPTIONAL
        error = error.__cause__ or error.__context__
    return False
