"""The package: what it exports, what importing it loads."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import langchain_adafuse


def test_exported_names_are_documented():
    for name in langchain_adafuse.__all__:
        assert inspect.getdoc(getattr(langchain_adafuse, name))


@pytest.mark.quick
def test_importing_it_loads_no_model_library():
    code = "import sys, langchain_adafuse; print({'torch', 'transformers'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
