"""The package: what it holds, what its guide says, what it is compared with."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from hatchling.builders.wheel import WheelBuilder
from llama_index.llms.adafuse import AdaFuseLLM

from tests.support.paths import ROOT
from tests.support.real_pages import SHOWN, needs_real_models, put_embedded

PACKAGE = ROOT / "integrations" / "llama-index-llms-adafuse"
BUILDER = WheelBuilder(str(PACKAGE))
GUIDE = (ROOT / "docs" / "guides" / "llamaindex.md").read_text(encoding="utf-8")


@pytest.mark.quick
def test_namespace_folders_have_no_init_file():
    """One there would hide llama_index.core or other integrations."""
    assert not (PACKAGE / "llama_index" / "__init__.py").exists()
    assert not (PACKAGE / "llama_index" / "llms" / "__init__.py").exists()


def test_the_wheel_holds_the_package_and_nothing_of_the_namespace():
    files = {file.distribution_path for file in BUILDER.recurse_included_files()}
    home = "llama_index/llms/adafuse/"
    assert {f"{home}{name}" for name in ("__init__.py", "base.py", "events.py", "py.typed")} < files
    assert all(file.startswith(home) for file in files)


def test_llamahub_metadata():
    hub = BUILDER.metadata.config["tool"]["llamahub"]
    assert hub["import_path"] == AdaFuseLLM.__module__.rpartition(".")[0]
    assert set(hub["class_authors"]) == {AdaFuseLLM.__name__}
    assert BUILDER.metadata.name == "llama-index-llms-adafuse"


# Guide ------------------------------------------------------------------------------------------


def test_every_block_of_the_guide_runs_offline_and_prints_what_it_says(tmp_path):
    put_embedded(tmp_path)
    blocks = SHOWN.findall(GUIDE)
    assert len(blocks) == len(re.findall("```python", GUIDE)) >= 6
    deny = "import pytest_socket\npytest_socket.disable_socket(allow_unix_socket=True)\n"
    code = deny + "\nprint('\\0')\n".join(block for block, _ in blocks)
    environment = {key: value for key, value in os.environ.items() if key != "TIKTOKEN_CACHE_DIR"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    printed = run.stdout.split("\0")
    for (block, expected), said in zip(blocks, printed, strict=True):
        if not needs_real_models(block):  # tests/real/test_pages.py checks what those print
            assert not expected or said.strip() == expected.strip()
