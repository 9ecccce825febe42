"""The public names are those of `public_api.txt`, and importing them loads no framework."""

import importlib
import inspect
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

REMEDY = "Update tests/public_api.txt and add a line to CHANGELOG.md that names what has changed."
PACKAGES = {
    **dict.fromkeys(("adafuse_llm", "benchmarks", "training"), ROOT),
    "langchain_adafuse": ROOT / "integrations/langchain-adafuse",
    "llama_index/llms/adafuse": ROOT / "integrations/llama-index-llms-adafuse",
}
"""The packages, and the folders that they are imported from."""

OPTIONAL = {
    *("bm25s", "lm_eval", "matplotlib", "pandas", "prometheus_client"),
    *("rich", "sacrebleu", "starlette", "uvicorn"),
}
"""Packages of the extras, and those that only benchmarks need."""


def test_every_module_can_be_imported_and_says_what_it_is_for() -> None:
    is_complete = all(map(find_spec, OPTIONAL))
    for package, folder in PACKAGES.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            try:
                module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
            except ImportError:
                if is_complete:
                    raise
            else:
                assert module.__doc__, path


def read_list() -> dict[str, list[str]]:
    """The listed names by module. Lines with names begin with whitespace."""
    listed: dict[str, list[str]] = {}
    for line in (ROOT / "tests/public_api.txt").read_text("utf-8").splitlines():
        if line[:1].isspace():
            listed[[*listed][-1]].append(line.strip())
        elif line and not line.startswith("#"):
            listed[line.strip()] = []
    return listed


@pytest.mark.parametrize(("module", "names"), read_list().items())
def test_a_module_exports_the_listed_names(module: str, names: list[str]) -> None:
    if module.endswith(".lm_eval"):
        pytest.importorskip("lm_eval", reason="needs the extra [eval]")
    imported = importlib.import_module(module)
    assert sorted(imported.__all__) == names, REMEDY
    for name in names:
        value = getattr(imported, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"


def test_importing_the_package_loads_no_framework() -> None:
    script = (
        "import sys, adafuse_llm;"
        "from adafuse_llm import AdaFuseConfig, AdaFuseEngine, MemberSpec;"
        "from adafuse_llm.backends import FakeBackend;from adafuse_llm.strategies import AdaFuse;"
        "AdaFuseEngine([FakeBackend('x', lambda t: {'<end>': 1.0, 'a': 0.0})]).generate('x');"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'accelerate', 'numpy')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
