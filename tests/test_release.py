"""The script of releases, the workflow that uses it, and texts for lists of integrations."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from langchain_core.language_models import BaseChatModel
from llama_index.core.llms.function_calling import FunctionCallingLLM

import adafuse_llm
from langchain_adafuse import ChatAdaFuse
from tests.support.packages import METADATA
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

FILES = (
    ".ci/release.py",
    "CHANGELOG.md",
    "CITATION.cff",
    "adafuse_llm/__init__.py",
    "integrations/langchain-adafuse/pyproject.toml",
    "integrations/llama-index-llms-adafuse/pyproject.toml",
)
VERSION = adafuse_llm.__version__
TEXTS = ROOT / "docs" / "release"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def release(clone: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(clone / ".ci/release.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_all_files_name_one_version() -> None:
    assert release(ROOT, "check") == (0, "")


def test_a_prepared_version_is_everywhere_and_has_its_changes(clone: Path) -> None:
    before = {file: (clone / file).read_text() for file in FILES}
    unreleased = before["CHANGELOG.md"].split("## [Unreleased]")[1]
    assert release(clone, "prepare", "9.8.7") == (0, "")
    code, changes = release(clone, "check", "v9.8.7")
    assert code == 0
    assert changes.startswith("### Added\n\n- ")
    assert changes.strip() in unreleased
    assert "Nothing has been released yet" not in (clone / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## .*", (clone / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "## [Unreleased]"
    assert re.fullmatch(r"## \[9\.8\.7\] - 20\d\d-\d\d-\d\d", headings[1])
    for file in FILES[2:]:
        text = (clone / file).read_text()
        assert text.replace("9.8.7", VERSION) == before[file]
        assert text.count("9.8.7") == 2 if "integrations" in file else 1


def test_a_version_that_is_released_or_has_no_changes_is_not_prepared(clone: Path) -> None:
    release(clone, "prepare", "9.8.7")
    assert release(clone, "prepare", "9.8.8")[1].startswith("CHANGELOG.md must have a section [Unr")
    log = clone / "CHANGELOG.md"
    log.write_text(log.read_text().replace("## [Unreleased]\n\n", "## [Unreleased]\n\n- More.\n\n"))
    assert release(clone, "prepare", "9.8.7")[1].startswith("CHANGELOG.md has a section for 9.8.7")
    assert release(clone, "prepare", "9.8")[1].startswith("a version is like 0.2.0 or 0.2.0rc1")


def test_wrong_versions_and_tags_are_found(clone: Path) -> None:
    assert release(clone, "check", "v9.8.7")[1].startswith(f"the tag must be v{VERSION}")
    assert release(clone, "check", f"v{VERSION}")[1].startswith("CHANGELOG.md must have a section")
    file = clone / FILES[-1]
    file.write_text(file.read_text().replace(f"~={VERSION}", "~=9.8.7"))
    code, message = release(clone, "check")
    assert (code, FILES[-1] in message) == (1, True)
    file.write_text(file.read_text().replace("~=9.8.7", ">=9.8.7"))
    assert release(clone, "check")[1].startswith(f"{FILES[-1]} must have each of these lines once")


def test_the_workflow_publishes_what_was_built_and_tried() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    steps = {name: str(job["steps"]) for name, job in jobs.items()}
    assert [name for name, text in steps.items() if "make build" in text] == ["build"]
    assert {"build", "try"} <= {*jobs["publish"]["needs"]}
    assert "attest-build-provenance" in steps["build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    pythons = [f"Programming Language :: Python :: {each}" for each in _tried(jobs)]
    text = (ROOT / "pyproject.toml").read_text()
    assert pythons == re.findall(r"Programming Language :: Python :: 3\.\d+", text)


def _tried(jobs: dict[str, dict]) -> list[str]:
    return jobs["try"]["strategy"]["matrix"]["python"]


# Texts for lists of integrations


def test_the_text_for_langchains_list_is_that_of_the_package() -> None:
    entry = yaml.safe_load((TEXTS / "langchain.yml").read_text(encoding="utf-8"))
    metadata = METADATA["langchain-adafuse"].core
    assert entry["pypi_package"] == metadata.name
    assert entry["docs_url"] == metadata.urls["Documentation"]
    assert metadata.urls["Repository"].endswith(f"github.com/{entry['github_repo']}")
    flags = yaml.safe_load(entry["capability_notes"])
    profile = ChatAdaFuse.from_embedded().profile or {}
    assert flags == {
        "stream": ChatAdaFuse._stream is not BaseChatModel._stream,
        "tool_calling": profile["tool_calling"],
        "structured_output": profile["structured_output"],
        "multimodal": profile["image_inputs"],
    }


def test_the_text_for_llamahub_is_that_of_the_package() -> None:
    text = (TEXTS / "llamaindex.md").read_text(encoding="utf-8")
    metadata = METADATA["llama-index-llms-adafuse"]
    hub = metadata.config["tool"]["llamahub"]
    (name,) = hub["class_authors"]
    assert f"`from {hub['import_path']} import {name}`" in text
    assert issubclass(
        getattr(importlib.import_module(hub["import_path"]), name), FunctionCallingLLM
    )
    assert f"- PyPI: https://pypi.org/project/{metadata.name}/\n" in text
    assert f"- Documentation: {metadata.core.urls['Documentation']}\n" in text
    assert f"- License: {metadata.core.license_expression}\n" in text
    (folder,) = re.findall(r"^- Source: .*/tree/main/(.*)$", text, re.MULTILINE)
    assert (ROOT / folder / "pyproject.toml").is_file()
