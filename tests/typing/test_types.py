"""What a type checker accepts and refuses: `uses.py` under the project's settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from mypy import api

from adafuse_llm import AdaFuseConfig
from adafuse_llm.adapters.options import ALIASES
from adafuse_llm.config import DecodeOptions

ROOT = Path(__file__).parents[2]
USES = Path(__file__).with_name("uses.py")
WRONG = re.compile(r"# error: \[([\w-]+)\]$")
UNUSED = """
[[tool.mypy.overrides]]
module = [
    "IPython.*", "PIL.*", "_pytest.*", "chardet.*", "cryptography.*", "langgraph.*", "matplotlib.*",
    "openai.*", "prompt_toolkit.*", "pytest.*", "sqlalchemy.*", "torch.*", "tornado.*",
    "workflows.*",
]
follow_imports = "skip"
"""
"""Large libraries of which `uses.py` uses no type. mypy takes half a minute to read them."""
REPORT = re.compile(r"uses\.py:(\d+): error: .*\[([\w-]+)\]$")


def test_right_uses_are_accepted_and_wrong_ones_refused(tmp_path: Path, monkeypatch) -> None:
    """A copy is checked: as a file of `tests` it would be held to less than strict mode.

    The cache is kept for the next run, and `make lint` has another one.
    """
    monkeypatch.chdir(ROOT)
    copy = Path(shutil.copy(USES, tmp_path))
    config = tmp_path / "pyproject.toml"
    project = (ROOT / config.name).read_text(encoding="utf-8")
    config.write_text(project.replace("$MYPY_CONFIG_FILE_DIR", str(ROOT)) + UNUSED, "utf-8")
    printed, failed, _ = api.run(
        ["--config-file", str(config), "--cache-dir", str(ROOT / ".mypy_cache" / "uses"), str(copy)]
    )
    assert not failed, failed
    found = {}
    for line in printed.splitlines():
        if report := REPORT.search(line):
            found[int(report[1])] = report[2]
        else:
            assert "note:" in line or line.startswith("Found "), line
    lines = dict(enumerate(USES.read_text(encoding="utf-8").splitlines(), start=1))
    expected = {number: wrong[1] for number, line in lines.items() if (wrong := WRONG.search(line))}
    refused = {number: f"{lines[number].strip()}  -> {code}" for number, code in found.items()}
    accepted = {number: lines[number].strip() for number in expected.keys() - found.keys()}
    assert not accepted, f"wrong uses that are accepted: {accepted}"
    assert found == expected, f"refused: {refused}"
    assert len(expected) > 30


@pytest.mark.quick
def test_the_typed_options_are_the_options() -> None:
    assert {*DecodeOptions.__annotations__} == {*AdaFuseConfig.model_fields}


@pytest.mark.quick
def test_the_typed_keywords_of_langchains_models_are_their_fields() -> None:
    from langchain_adafuse import AdaFuseLLM, ChatAdaFuse
    from langchain_adafuse._model import ACCEPTED, ModelFields
    from langchain_adafuse.chat_models import ChatFields

    fields = {*AdaFuseLLM.model_fields, *ChatAdaFuse.model_fields}
    assert {*ChatFields.__annotations__} == {*fields, *ALIASES, *ACCEPTED}
    assert {*ChatFields.__annotations__} - {*ModelFields.__annotations__} == {"enforce"}


@pytest.mark.quick
def test_the_typed_keywords_of_the_llama_index_llm_are_its_fields() -> None:
    from llama_index.llms.adafuse import AdaFuseLLM
    from llama_index.llms.adafuse._model import LLMOptions

    named = {"members", "engine"}  # parameters of their own
    fields = {*AdaFuseLLM.model_fields, *ALIASES}
    assert {*LLMOptions.__annotations__} == fields - named
