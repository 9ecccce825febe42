"""Right and wrong uses, for a type checker; never run.

Every line that ends in ``# type: ignore[code]`` is a mistake. If mypy finds no error with that code
there, it reports an unused comment, so `make lint` fails. mypy must accept all other lines, of
which ``# ok`` marks those that this file is about.
"""

# ruff: noqa: F841

from __future__ import annotations

from pathlib import Path

from langchain_core.messages import AIMessage, HumanMessage
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms import adafuse as li

import langchain_adafuse as lc
from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    Generation,
    MemberSpec,
    ScoredText,
    StreamEvent,
    TransformersMember,
)
from adafuse_llm.config import DecodeOptions

PATHS = ["Qwen/Qwen3-8B", "google/gemma-3-4b-it"]


def options() -> None:
    AdaFuseConfig()  # ok
    AdaFuseConfig(stop=["x"], weights={"a": 1}, use=["a", "b"])  # ok
    AdaFuseConfig(max_wrods=3)  # type: ignore[call-arg]
    AdaFuseConfig(max_words="three")  # type: ignore[arg-type]
    TransformersMember(path="Qwen/Qwen3-8B", name="qwen", weight=2)  # ok
    TransformersMember(path="Qwen/Qwen3-8B", wieght=2)  # type: ignore[call-arg]


def engines(spec: MemberSpec, config: AdaFuseConfig) -> None:
    AdaFuseEngine.from_pretrained([*PATHS, spec], config=config, strategy="mixture")  # ok
    AdaFuseEngine(PATHS)  # type: ignore[arg-type]


def calls(engine: AdaFuseEngine) -> None:
    one: Generation = engine.generate("x")  # ok
    shared: DecodeOptions = {"max_words": 1, "stop": "x"}  # ok
    engine.generate("x", **shared)  # ok
    misspelled: DecodeOptions = {"max_wrods": 1}  # type: ignore[typeddict-unknown-key]
    engine.generate("x", max_wrods=3)  # type: ignore[call-arg]
    engine.generate("x", max_words="three")  # type: ignore[arg-type]
    events: list[StreamEvent] = list(engine.stream("x", max_new_tokens=5))  # ok
    many: list[Generation] = engine.generate_batch(["x", "y"], branching_factor=1)  # ok
    scored: tuple[ScoredText, ...] = engine.score("x", ["y"], weights=[1, 2], use=None).texts  # ok
    engine.score("x", ["y"], wieghts=[1, 2])  # type: ignore[call-arg]


async def asynchronous_calls(engine: AdaFuseEngine) -> None:
    one: Generation = await engine.agenerate("x", margin_threshold=0.5)  # ok
    await engine.agenerate("x", margin=0.5)  # type: ignore[call-arg]
    async for event in engine.astream("x", stop="y"):  # ok
        text: str = event.text  # ok


def langchain(engine: AdaFuseEngine, path: Path) -> None:
    lc.ChatAdaFuse(members=[*PATHS, TransformersMember(path="a"), {"path": "b"}])  # ok
    lc.ChatAdaFuse(engine=engine, model="wren+heron", max_tokens=50, timeout=3.5)  # ok
    lc.ChatAdaFuse(engine=engine, max_wrods=3)  # type: ignore[call-arg]
    lc.ChatAdaFuse(engine=engine, round_detail="some")  # type: ignore[arg-type]
    lc.ChatAdaFuse.from_config(path, max_word=1)  # type: ignore[call-arg]
    lc.ChatAdaFuse(engine=engine, tool_choice="any", parallel_tool_calls=False)  # ok
    lc.AdaFuseLLM(engine=engine, max_wrods=3)  # type: ignore[call-arg]
    lc.AdaFuseLLM(engine=engine, tool_choice="any")  # type: ignore[call-arg]


async def langchain_calls(chat: lc.ChatAdaFuse, llm: lc.AdaFuseLLM) -> None:
    message: AIMessage = chat.invoke("x")  # ok
    chat.invoke([HumanMessage("x")], max_words=1)  # ok
    await chat.ainvoke("x", max_words=1, use="a")  # ok
    chat.bind_tools([], tool_choice="any", anything=1)  # ok
    chat.with_structured_output({"type": "object"}, method="yaml")  # type: ignore[arg-type]
    chat.invoke(5)  # type: ignore[arg-type]
    text: str = llm.invoke("x", anything=1)  # ok
    llm.generate("x")  # type: ignore[arg-type]


def llama_index(engine: AdaFuseEngine, path: Path) -> None:
    li.AdaFuseLLM(members=[*PATHS, TransformersMember(path="a"), {"path": "b"}])  # ok
    li.AdaFuseLLM(engine=engine, use="a", max_tokens=5, stop=("x",), weights={"a": 1})  # ok
    li.AdaFuseLLM(engine=engine, max_wrods=3)  # type: ignore[call-arg]
    li.AdaFuseLLM(engine)  # type: ignore[arg-type]
    li.AdaFuseLLM.from_config(path, max_word=1)  # type: ignore[call-arg]


async def llama_index_calls(llm: li.AdaFuseLLM) -> None:
    text: str = llm.complete("x", anything=1).text  # ok
    llm.max_tokens = None  # ok
    await llm.astream_chat([ChatMessage("x")], anything=1)  # ok
