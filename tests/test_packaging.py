"""The three distributions: one version, exact pins, and bounds that `make test-lowest` uses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.version import Version

import adafuse_llm
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

INTEGRATIONS = ("langchain-adafuse", "llama-index-llms-adafuse")
METADATA = {
    "adafuse-llm": WheelBuilder(str(ROOT)).metadata,
    **{name: WheelBuilder(str(ROOT / "integrations" / name)).metadata for name in INTEGRATIONS},
}


def test_the_three_distributions_have_one_version() -> None:
    versions = {name: metadata.version for name, metadata in METADATA.items()}
    assert versions == dict.fromkeys(METADATA, adafuse_llm.__version__)


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == adafuse_llm.__version__


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_the_integrations_pin_the_core_exactly(name: str) -> None:
    pins = [each for each in METADATA[name].core.dependencies if each.startswith("adafuse-llm")]
    assert pins == [f"adafuse-llm=={adafuse_llm.__version__}"]


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_the_integrations_have_the_same_license_file(name: str) -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (ROOT / "integrations" / name / "LICENSE").read_text(encoding="utf-8") == text


def test_the_lowest_constraints_are_the_lower_bounds() -> None:
    bounds: dict[str, set[Version]] = {}
    for metadata in METADATA.values():
        extras = metadata.core.optional_dependencies.values()
        for line in [*metadata.core.dependencies, *(each for extra in extras for each in extra)]:
            requirement = Requirement(line)
            lower = {
                Version(each.version) for each in requirement.specifier if each.operator == ">="
            }
            bounds.setdefault(requirement.name, set()).update(lower)
    del bounds["adafuse-llm"], bounds["torch"]  # the Makefile chooses the version of torch

    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    assert {name: {Version(version)} for name, version in pins} == bounds


def test_extras_in_install_hints_exist() -> None:
    extras = METADATA["adafuse-llm"].core.optional_dependencies
    files = [
        file
        for folder in ("adafuse_llm", "integrations", "docs", "cookbooks")
        for suffix in ("py", "md", "ipynb")
        for file in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    hints = {
        extra
        for file in [ROOT / "README.md", *files]
        for extra in re.findall(r"adafuse-llm\[(\w+)\]", file.read_text(encoding="utf-8"))
    }
    assert {"cli", "eval", "tune"} <= hints <= extras.keys()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_s13_the_first_command_installs_only_what_it_needs(tmp_path: Path) -> None:
    def installs(target: str) -> list[str]:
        arguments = ["make", "--dry-run", target, f"VENV={tmp_path / 'new'}"]
        printed = subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True, text=True)
        lines = [line for line in printed.stdout.splitlines() if "pip install" in line]
        return [line for line in lines if "--upgrade" not in line]

    (demo,) = installs("demo")
    assert demo.endswith("-e '.[cli]'")
    assert installs("serve") == [demo, demo.replace("cli", "cli,grammar,serve")]
    assert installs("test")[0] == demo
    assert "--group dev" in installs("test")[1]
