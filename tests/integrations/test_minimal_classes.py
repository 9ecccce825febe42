"""The two integrations as they are packaged, and their classes over fake members."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.llms import CustomLLM as LlamaIndexBase
from llama_index.llms.adafuse import AdaFuseLLM as LlamaIndexLLM

from adafuse_llm import AdaFuseEngine, FakeBackend
from langchain_adafuse import AdaFuseLLM as LangChainLLM

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


def test_langchain_answers_streams_and_batches_the_same_text(engine):
    llm = LangChainLLM(engine=engine)
    assert llm.invoke("What stands here?") == "".join(REPLY)
    assert "".join(llm.stream("What stands here?")) == "".join(REPLY)
    assert llm.batch(["What stands here?", "And now?"]) == ["".join(REPLY)] * 2


async def test_langchain_is_asynchronous(engine):
    llm = LangChainLLM(engine=engine)
    assert await llm.ainvoke("What stands here?") == "".join(REPLY)
    assert "".join([chunk async for chunk in llm.astream("What?")]) == "".join(REPLY)


def test_langchain_takes_stop_and_options_per_call(engine):
    llm = LangChainLLM(engine=engine, options={"max_words": 1})
    assert llm.invoke("What stands here?", stop=[", since"]) == " The mill"
    assert llm.invoke("What stands here?", max_new_tokens=1) == " The"


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
