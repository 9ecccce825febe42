"""The public names are those of `public_api.txt`, and importing them loads no framework."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

LIST = Path(__file__).with_name("public_api.txt")
REMEDY = "Update tests/public_api.txt and add a line to CHANGELOG.md that names what has changed."


def read_list(text: str) -> dict[str, list[str]]:
    """Names by module."""
    listed: dict[str, list[str]] = {}
    module = ""
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line[0].isspace():
            listed[module].append(line.strip())
        else:
            module = line.strip()
            listed[module] = []
    return listed


LISTED = read_list(LIST.read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", LISTED)
def test_a_module_exports_the_listed_names(module: str) -> None:
    if module.endswith(".lm_eval"):
        pytest.importorskip("lm_eval", reason="needs the extra [eval]")
    imported = importlib.import_module(module)
    names = LISTED[module]
    exported = imported.__all__
    assert len(set(exported)) == len(exported)
    appeared, disappeared = {*exported} - {*names}, {*names} - {*exported}
    assert not appeared, f"new in {module}: {sorted(appeared)}. {REMEDY}"
    assert not disappeared, f"no longer in {module}: {sorted(disappeared)}. {REMEDY}"
    assert names == sorted(names)
    for name in names:
        value = getattr(imported, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__name__ == name
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
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
