"""The package: its base classes, and what importing it loads."""

import subprocess
import sys

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.llms.adafuse import AdaFuseLLM


@pytest.mark.quick
def test_the_base_classes():
    names = [base.__name__ for base in AdaFuseLLM.__mro__]
    assert BaseLLM.__name__ in names
    assert FunctionCallingLLM.__name__ in names
    assert AdaFuseLLM.class_name() == "AdaFuseLLM"


def test_importing_it_loads_no_model_library():
    code = "import sys, llama_index.llms.adafuse; print({'torch', 'transformers'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
