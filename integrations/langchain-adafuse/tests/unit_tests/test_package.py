"""The package: what importing it loads."""

import subprocess
import sys


def test_importing_it_loads_no_model_library():
    code = "import sys, langchain_adafuse; print({'torch', 'transformers'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
