"""Right and wrong uses, for a type checker; never run.

Every line that ends in ``# type: ignore[code]`` is a mistake. If mypy finds no error with that code
there, it reports an unused comment, so `make lint` fails. mypy must accept all other lines, and so
it must all right uses in the other tests.
"""

# ruff: noqa: F841

from __future__ import annotations

from pathlib import Path

from llama_index.llms import adafuse as li

import langchain_adafuse as lc
from adafuse_llm import AdaFuseConfig, AdaFuseEngine, TransformersMember
from adafuse_llm.config import DecodeOptions

PATHS = ["Qwen/Qwen3-8B", "google/gemma-3-4b-it"]


def options() -> None:
    AdaFuseConfig(max_wrods=3)  # type: ignore[call-arg]
    AdaFuseConfig(max_words="three")  # type: ignore[arg-type]
    TransformersMember(path="Qwen/Qwen3-8B", wieght=2)  # type: ignore[call-arg]


async def calls(engine: AdaFuseEngine) -> None:
    AdaFuseEngine(PATHS)  # type: ignore[arg-type]
    misspelled: DecodeOptions = {"max_wrods": 1}  # type: ignore[typeddict-unknown-key]
    engine.generate("x", max_wrods=3)  # type: ignore[call-arg]
    engine.generate("x", max_words="three")  # type: ignore[arg-type]
    engine.score("x", ["y"], wieghts=[1, 2])  # type: ignore[call-arg]
    await engine.agenerate("x", margin=0.5)  # type: ignore[call-arg]


def langchain(engine: AdaFuseEngine, path: Path) -> None:
    chat = lc.ChatAdaFuse(members=[*PATHS, TransformersMember(path="a"), {"path": "b"}])
    lc.ChatAdaFuse.from_config(path, tool_choice="any")
    chat.invoke("x", max_words=1, anything=1)
    chat.with_structured_output({"type": "object"}, method="yaml")  # type: ignore[arg-type]
    chat.invoke(5)  # type: ignore[arg-type]
    llm = lc.AdaFuseLLM(engine=engine, model="wren+heron", max_tokens=50, timeout=3.5)
    text: str = llm.invoke("x", anything=1)
    llm.generate("x")  # type: ignore[arg-type]


def llama_index(engine: AdaFuseEngine, path: Path) -> None:
    llm = li.AdaFuseLLM(members=[*PATHS, TransformersMember(path="a"), {"path": "b"}])
    li.AdaFuseLLM(engine)  # type: ignore[arg-type]
    li.AdaFuseLLM.from_config(path, max_words=1)
    text: str = llm.complete("x", anything=1).text
    llm.max_tokens = None
