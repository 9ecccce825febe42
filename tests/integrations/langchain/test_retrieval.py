"""Questions about the handbook, answered from what an offline retriever finds; the guide."""

from __future__ import annotations

import re
from typing import Any

import pytest
import pytest_socket
from langchain_core.messages import AIMessage

from adafuse_llm import AdaFuseEngine
from adafuse_llm.serving import create_app
from tests.support.paths import ROOT
from tests.support.real_pages import put_embedded
from tests.support.serving import served

GUIDE = ROOT / "docs" / "guides" / "langchain.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
SERVER = "http://127.0.0.1:8000"


@pytest.fixture
def in_folder_of_models(tmp_path, monkeypatch):
    put_embedded(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_the_readme_answers_with_sources_in_under_twenty_lines(capsys, in_folder_of_models):
    (block,) = [each for each in BLOCKS if "handbook_path" in each]
    assert len(block.splitlines()) < 20
    names: dict[str, Any] = {}
    exec(block, names)
    assert isinstance(names["result"]["answer"], AIMessage)
    said = capsys.readouterr().out
    assert "silesse-mill.md" in said
    assert names["result"]["answer"].content in names["result"]["context"][0].text
    assert names["rounds"].summary().rounds == len(names["rounds"].rounds) > 0


@pytest.mark.parametrize("block", [each for each in BLOCKS if "handbook_path" not in each])
def test_other_blocks_of_the_readme_run(block, capsys, in_folder_of_models):
    if SERVER in block:
        pytest_socket.enable_socket()
        with AdaFuseEngine.from_embedded() as engine, served(create_app(engine)) as address:
            exec(block.replace(SERVER, address), {})
    else:
        exec(block, {})
    if "print" in block:
        assert capsys.readouterr().out.strip()
