"""The three distributions: pins, and bounds of `make test-lowest`."""

import re

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.version import Version

from adafuse_llm.backends.llamacpp.declarations import BUILDS
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

INTEGRATIONS = ("langchain-adafuse", "llama-index-llms-adafuse")
FOLDERS = {"adafuse-llm": ROOT, **{name: ROOT / "integrations" / name for name in INTEGRATIONS}}
METADATA = {name: WheelBuilder(str(folder)).metadata for name, folder in FOLDERS.items()}


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
