"""The programs of the guide run, with the embedded members in the place of real ones."""

from __future__ import annotations

import re

import pytest
import pytest_socket

from adafuse_llm import AdaFuseEngine
from adafuse_llm.serving import create_app
from tests.support.paths import ROOT
from tests.support.real_pages import put_embedded
from tests.support.serving import served

GUIDE = ROOT / "docs" / "guides" / "langchain.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
SERVER = "http://127.0.0.1:8000"


@pytest.mark.parametrize("block", BLOCKS)
def test_programs_of_the_guide_run(block, capsys, tmp_path, monkeypatch):
    put_embedded(tmp_path)
    monkeypatch.chdir(tmp_path)
    if SERVER in block:
        pytest_socket.enable_socket()
        with AdaFuseEngine.from_embedded() as engine, served(create_app(engine)) as address:
            exec(block.replace(SERVER, address), {})
    else:
        exec(block, {})
    said = capsys.readouterr().out
    assert said.strip() or "print" not in block
    assert "handbook_path" not in block or "silesse-mill.md" in said
