"""The LangChain integration over fake members."""

from __future__ import annotations

import subprocess
import sys

import pytest

from adafuse_llm import AdaFuseEngine, FakeBackend
from langchain_adafuse import AdaFuseLLM as LangChainLLM

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


def test_importing_an_integration_loads_no_model_library():
    code = "import sys, langchain_adafuse; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
