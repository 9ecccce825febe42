"""What importing the packages loads."""

import subprocess
import sys

import pytest
from langchain_core.language_models import BaseChatModel
from llama_index.core.llms.llm import LLM


@pytest.mark.parametrize("package", ["langchain_adafuse", "llama_index.llms.adafuse"])
def test_importing_a_package_loads_no_model_library(package: str) -> None:
    code = f"import sys, {package}; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.quick
def test_private_methods_that_we_override_or_call_exist() -> None:
    for base, names in (
        (BaseChatModel, ("_get_llm_string", "_resolve_model_profile", "_streaming_disabled")),
        (LLM, ("_extend_prompt", "_structured_astream_call", "_structured_stream_call")),
    ):
        assert [name for name in names if not hasattr(base, name)] == []
