"""The public names are those of `public_api.txt`, and changes of that list are in the changelog.

The integrations also import internal names, those of `integration_api.txt`. An integration accepts
later patch releases of the core, so these names and their parameters stay within a minor version.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import is_typeddict

from adafuse_llm import __version__

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("public_api.txt")
CHANGELOG = ROOT / "CHANGELOG.md"
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


def test_what_the_reference_documents_is_public() -> None:
    pages = "\n".join(page.read_text("utf-8") for page in ROOT.glob("docs/reference/*.md"))
    objects = re.findall(
        r"auto(?:class|function):: ((?:adafuse_llm|langchain_adafuse)[\w.]*)", pages
    )
    assert len(objects) > 20
    for path in objects:
        module, _, name = path.rpartition(".")
        assert name in LISTED.get(module, []), f"docs/reference documents {path}, not public"
    modules = re.findall(
        r"automodule:: ((?:adafuse_llm|llama_index)[\w.]*)\n\s+:members:(.*)", pages
    )
    assert len(modules) > 5
    for module, members in modules:
        named = [name.strip() for name in members.split(",") if name.strip()]
        assert {*named} <= {*LISTED.get(module, [])}, f"{module}: {named}"


def unexplained(before: str, now: str, changelog: str) -> list[str]:
    """Names that two lists do not share and that a text does not name."""
    old, new = (
        {(module, name) for module, names in read_list(text).items() for name in names}
        for text in (before, now)
    )
    changed = {name for _, name in old ^ new}
    return sorted(name for name in changed if not re.search(rf"\b{name}\b", changelog))


def changes_since(changelog: str, version: str) -> str:
    """The sections of a changelog above that of a version."""
    above, heading, _ = changelog.partition(f"\n## [{version}]")
    assert heading, f"CHANGELOG.md has no section for {version}"
    return above


def test_changed_names_are_found_in_what_has_changed_since_a_version() -> None:
    before = "a\n    One\n    Two\nb\n    Three\n"
    now = "# comment\na\n    One\n    Four\nb\n    Three\n    Two\n"
    log = "# Changelog\n\n## [Unreleased]\n\n- `Two` moved.\n\n## [1.0]\n\n- `Four`\n"
    assert unexplained(before, before, "") == []
    assert unexplained(before, now, "") == ["Four", "Two"]
    assert unexplained(before, now, changes_since(log, "1.0")) == ["Four"]
    assert unexplained(before, now, "Twofold, Fourth") == ["Four", "Two"]
    with pytest.raises(AssertionError, match=r"no section for 2\.0"):
        changes_since(log, "2.0")


def git(*arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def test_names_changed_since_the_last_release_are_in_the_changelog() -> None:
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*")
    if not tag:
        pytest.skip("no release has been tagged, or this is no git clone")
    before = git("show", f"{tag.strip()}:tests/public_api.txt")
    if before is None:
        pytest.skip(f"{tag.strip()} has no list of public names")
    changes = changes_since(CHANGELOG.read_text(encoding="utf-8"), tag.strip().removeprefix("v"))
    missing = unexplained(before, LIST.read_text(encoding="utf-8"), changes)
    assert not missing, f"changed since {tag.strip()}, not in CHANGELOG.md: {missing}"


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


def changed(listed: dict[str, list[str]]) -> list[str]:
    """Listed internal names that the core has no longer, or has with other parameters."""
    found = []
    for module, lines in listed.items():
        for line in lines:
            try:
                now = declared(module, line.partition("(")[0])
            except (ImportError, AttributeError):
                now = "missing"
            if now != line:
                found.append(f"{module}: {line} is now {now}")
    return found


def test_l6_internal_names_of_the_integrations_are_listed() -> None:
    listed = read_list(INTERNAL.read_text(encoding="utf-8"))
    imported = {
        module: [declared(module, name) for name in names]
        for module, names in internal_names().items()
    }
    assert listed == imported, "Update tests/integration_api.txt; its first lines give the rule."


def test_changed_internal_names_are_found() -> None:
    listed = {
        "adafuse_llm.errors": ["short_repr(value)", "nearest(name)", "gone(x)"],
        "adafuse_llm.gone": ["X"],
        "adafuse_llm.results": ["FinishReason"],
    }
    assert [line.rpartition(" is now ")[0] for line in changed(listed)] == [
        "adafuse_llm.errors: nearest(name)",
        "adafuse_llm.errors: gone(x)",
        "adafuse_llm.gone: X",
    ]


def test_internal_names_stay_within_a_minor_version() -> None:
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*")
    if not tag or not __version__.startswith(
        tag.strip().removeprefix("v").rpartition(".")[0] + "."
    ):
        pytest.skip("no release of this minor version has been tagged, or this is no git clone")
    before = git("show", f"{tag.strip()}:tests/integration_api.txt")
    if before is None:
        pytest.skip(f"{tag.strip()} has no list of internal names")
    assert changed(read_list(before)) == []


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
