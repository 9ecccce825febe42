"""The package: what it holds, and what its guide says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hatchling.builders.wheel import WheelBuilder
from llama_index.llms.adafuse import AdaFuseLLM

from tests.support.paths import ROOT
from tests.support.real_pages import SHOWN, needs_real_models, put_embedded

GUIDE = (ROOT / "docs" / "guides" / "llamaindex.md").read_text(encoding="utf-8")


@pytest.mark.quick
def test_the_wheel_holds_the_package_and_no_init_file_of_the_namespace():
    """One there would hide llama_index.core or other integrations."""
    builder = WheelBuilder(str(ROOT / "integrations" / "llama-index-llms-adafuse"))
    files = {file.distribution_path for file in builder.recurse_included_files()}
    home = "llama_index/llms/adafuse/"
    assert {f"{home}{name}" for name in ("__init__.py", "base.py", "events.py", "py.typed")} < files
    assert all(file.startswith(home) for file in files)
    hub = builder.metadata.config["tool"]["llamahub"]
    assert hub["import_path"] == AdaFuseLLM.__module__.rpartition(".")[0]


@pytest.mark.slow
def test_every_block_of_the_guide_runs_offline_and_prints_what_it_says(tmp_path):
    put_embedded(tmp_path)
    blocks = SHOWN.findall(GUIDE)
    deny = "import pytest_socket\npytest_socket.disable_socket(allow_unix_socket=True)\n"
    code = deny + "\nprint('\\0')\n".join(block for block, _ in blocks)
    environment = {key: value for key, value in os.environ.items() if key != "TIKTOKEN_CACHE_DIR"}
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, text=True, env=environment, cwd=tmp_path)
    for (block, expected), said in zip(blocks, printed.split("\0"), strict=True):
        if not needs_real_models(block):  # tests/real/test_pages.py checks what those print
            assert not expected or said.strip() == expected.strip()
