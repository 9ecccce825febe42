"""The three distributions: one version and address, pins, and bounds of `make test-lowest`."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import adafuse_llm
from adafuse_llm.backends.llamacpp.declarations import BUILDS
from tests.support.packages import INTEGRATIONS, METADATA
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

REPOSITORY = METADATA["adafuse-llm"].core.urls["Repository"]
"""The address of the repository. All others in this repository follow it."""


def test_the_three_distributions_have_one_version() -> None:
    versions = {name: metadata.version for name, metadata in METADATA.items()}
    assert versions == dict.fromkeys(METADATA, adafuse_llm.__version__)


@pytest.mark.parametrize("name", METADATA)
def test_addresses_of_a_distribution_name_files_of_the_repository(name: str) -> None:
    urls = METADATA[name].core.urls
    assert urls.keys() == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    assert urls["Homepage"] == urls["Repository"] == REPOSITORY
    assert urls["Issues"] == f"{REPOSITORY}/issues"
    for label in ("Documentation", "Changelog"):
        start, path = urls[label].split("/blob/main/")
        assert start == REPOSITORY
        assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_what_the_tests_of_an_integration_need_is_installed_for_all_tests(name: str) -> None:
    needed = METADATA[name].config["dependency-groups"]["test"]
    assert needed[0] == "adafuse-llm[grammar]"
    assert {*needed[1:]} <= {*METADATA["adafuse-llm"].config["dependency-groups"]["dev"]}


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_the_tests_of_an_integration_need_only_published_packages(name: str) -> None:
    files = [*(ROOT / "integrations" / name / "tests").rglob("*.py")]
    assert files
    for file in files:
        imported = re.findall(r"^\s*(?:from|import)\s+(\w+)", file.read_text("utf-8"), re.MULTILINE)
        assert not {"tests", "benchmarks", "training", "docs"} & {*imported}, file


def test_the_lowest_constraints_are_the_lower_bounds() -> None:
    bounds: dict[str, set[Version]] = {}
    for metadata in METADATA.values():
        extras = metadata.core.optional_dependencies.values()
        for line in [*metadata.core.dependencies, *(each for extra in extras for each in extra)]:
            requirement = Requirement(line)
            lower = {
                Version(each.version)
                for each in requirement.specifier
                if each.operator in (">=", "==")
            }
            bounds.setdefault(requirement.name, set()).update(lower)
    del bounds["adafuse-llm"], bounds["torch"]  # the Makefile chooses the version of torch

    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    assert {name: {Version(version)} for name, version in pins} == bounds


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-lowest.txt"])
def test_the_pinned_llama_cpp_is_the_declared_one(file: str) -> None:
    pins = {f"{each.name}=={each.version}" for each in BUILDS.values()}
    extra = METADATA["adafuse-llm"].core.optional_dependencies["gguf"]
    assert pins <= {line.split(";")[0] for line in extra}
    assert pins <= {*(ROOT / file).read_text(encoding="utf-8").splitlines()}


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
        for names in re.findall(
            r"""adafuse-llm\[(\w+)\]|install_command\(["']([\w,]+)["']\)""",
            file.read_text(encoding="utf-8"),
        )
        for extra in "".join(names).split(",")
    }
    assert {"cli", "eval", "tune"} <= hints <= extras.keys()
