"""What importing an integration costs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.quick
@pytest.mark.parametrize("module", ["langchain_adafuse", "llama_index.llms.adafuse"])
def test_importing_an_integration_loads_no_model_library(module):
    code = f"import sys, {module}; print({{'torch', 'transformers'}} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
