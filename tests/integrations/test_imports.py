"""What importing the packages loads."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["langchain_adafuse", "llama_index.llms.adafuse"])
def test_importing_a_package_loads_no_model_library(package: str) -> None:
    code = f"import sys, {package}; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
