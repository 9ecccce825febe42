"""The integrations as they are packaged, and LlamaIndex's class over fake members."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.llms import CustomLLM as LlamaIndexBase
from llama_index.llms.adafuse import AdaFuseLLM as LlamaIndexLLM

from adafuse_llm import AdaFuseEngine, FakeBackend

ROOT = Path(__file__).parents[2]
REPLY = [" The", " mill", ",", " since", " 1874", "."]


def spelling(reply: list[str]):
    """A rule that writes `reply` after any prompt."""

    def rule(text: str) -> dict[str, float]:
        written = next(n for n in range(len(reply), -1, -1) if text.endswith("".join(reply[:n])))
        if written == len(reply):
            return {"<end>": 0.95, "!": 0.05}
        return {reply[written]: 0.9, " no": 0.1}

    return rule


@pytest.fixture
def engine():
    with AdaFuseEngine(
        [FakeBackend("oak", spelling(REPLY)), FakeBackend("elm", spelling(REPLY))]
    ) as engine:
        yield engine


def test_llama_index_completes_streams_and_chats_the_same_text(engine):
    llm = LlamaIndexLLM(engine)
    assert isinstance(llm, LlamaIndexBase)
    assert llm.complete("What stands here?").text == "".join(REPLY)
    streamed = list(llm.stream_complete("What stands here?"))
    assert "".join(chunk.delta for chunk in streamed) == streamed[-1].text == "".join(REPLY)
    reply = llm.chat([ChatMessage(role="user", content="What stands here?")])
    assert reply.message.content == "".join(REPLY).removeprefix(" ")
    assert llm.metadata.model_name == "oak+elm"


def test_namespace_packages_have_no_init_file():
    """An __init__.py there would hide llama_index.core or other integrations."""
    package = ROOT / "integrations" / "llama-index-llms-adafuse" / "llama_index"
    assert not (package / "__init__.py").exists()
    assert not (package / "llms" / "__init__.py").exists()


@pytest.mark.parametrize("module", ["langchain_adafuse", "llama_index.llms.adafuse"])
def test_importing_an_integration_loads_no_model_library(module):
    code = f"import sys, {module}; print({{'torch', 'transformers'}} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
