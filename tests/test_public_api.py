"""The public names are those of `public_api.txt`, and changes of that list are in the changelog.

The integrations also import internal names, those of `integration_api.txt`. An integration accepts
later patch releases of the core, so these names and their parameters stay within a minor version.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import is_typeddict

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("public_api.txt")
INTERNAL = Path(__file__).with_name("integration_api.txt")
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


# Internal names that the integrations import


def internal_names() -> dict[str, list[str]]:
    """The names that the integrations import from the core and that are not public, by module."""
    names: dict[str, set[str]] = {}
    for folder in ("langchain-adafuse/langchain_adafuse", "llama-index-llms-adafuse/llama_index"):
        for file in (ROOT / "integrations" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    assert not any(each.name.startswith("adafuse_llm") for each in node.names), file
                elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "adafuse_llm"
                ):
                    found = {each.name for each in node.names} - {
                        *LISTED.get(node.module or "", [])
                    }
                    names.setdefault(node.module or "", set()).update(found)
    return {module: sorted(found) for module, found in sorted(names.items()) if found}


def declared(module: str, name: str) -> str:
    """A name with its parameters, if it has some; those with a default end with ``=``."""
    value = getattr(importlib.import_module(module), name)
    if (not inspect.isfunction(value) and not inspect.isclass(value)) or is_typeddict(value):
        return name
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    parameters: list[str] = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p[0] == "*" for p in parameters):
            parameters.append("*")
        default = "" if parameter.default is parameter.empty else "="
        parameters.append(f"{stars.get(parameter.kind, '')}{parameter.name}{default}")
    return f"{name}({', '.join(parameters)})"


def test_internal_names_of_the_integrations_are_listed() -> None:
    listed = read_list(INTERNAL.read_text(encoding="utf-8"))
    imported = {
        module: [declared(module, name) for name in names]
        for module, names in internal_names().items()
    }
    assert listed == imported, "Update tests/integration_api.txt; its first lines give the rule."


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
