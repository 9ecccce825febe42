"""Query engines lose no context if prompts are packed by the members' counts."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import TextNode
from llama_index.llms.adafuse import AdaFuseLLM
from pydantic import BaseModel

from adafuse_llm import AdaFuseEngine, ContextWindowError, MalformedReplyError
from tests.support.hashing import HashingEmbedding
from tests.support.llama_calls import prompts_read
from tests.support.scripted import scripted_engine

WINDOW = 4096
NODES = 8
QUESTION = "Which parts of the mill report are there?"

SKIPPED = ("generation", "no_text", "context_only")
"""Modes in which core gives the members no context."""

READING = [mode.value for mode in ResponseMode if mode.value not in SKIPPED]
COMPLETE = [mode for mode in READING if mode != "simple_summarize"]
"""Modes that do not truncate the context by definition."""

WAYS = [
    (mode, way, streaming)
    for mode in READING
    for way in ("query", "aquery")
    for streaming in (False, True)
    if not (streaming and "accumulate" in mode)  # core refuses to stream these
]


@pytest.fixture(autouse=True)
def untouched_settings(monkeypatch):
    """Core keeps its tokenizer and prompt helper in global variables."""
    import llama_index.core

    for name in ("_prompt_helper", "_chat_prompt_helper"):
        monkeypatch.setattr(Settings, name, None)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)


def index_of(words: int) -> VectorStoreIndex:
    """An index of nodes with `words` lines each, with marks at three places."""
    nodes = []
    for number in range(NODES):
        lines = [f"mill {number} report word{word}" for word in range(words)]
        lines[words // 2] = f"middle{number}"
        nodes.append(TextNode(text=" ".join([f"start{number}", *lines, f"finish{number}"])))
    return VectorStoreIndex(nodes, embed_model=HashingEmbedding())


LONG = index_of(100)

MARKS = [f"{place}{n}" for place in ("start", "middle", "finish") for n in range(NODES)]


@pytest.fixture(scope="module")
def engine():
    with scripted_engine(lambda prompt: "Eight parts.", window=WINDOW, max_new_tokens=60) as engine:
        yield engine


async def ask(query_engine: Any, way: str) -> str:
    response = (
        query_engine.query(QUESTION) if way == "query" else await query_engine.aquery(QUESTION)
    )
    if not hasattr(response, "response_gen"):
        return str(response)
    if hasattr(response.response_gen, "__aiter__"):
        return "".join([token async for token in response.response_gen])
    return "".join(response.response_gen)


def missing(engine: AdaFuseEngine, prompts: dict[str, list[list[int]]]) -> list[str]:
    """The marks that a member has not read."""
    texts = {
        backend.name: "\n".join(
            backend.codec.decode_continuation((), ids) for ids in prompts[backend.name]
        )
        for backend in engine.backends
    }
    return [
        f"{mark} at {name}" for name, text in texts.items() for mark in MARKS if mark not in text
    ]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("mode", "way", "streaming", "source"),
    [
        *((*way, "settings") for way in WAYS if (way[1] == "aquery") == way[2]),
        *((mode, "query", False, source) for mode in READING for source in ("helper", "tokenizer")),
    ],
)
async def test_prompts_packed_by_the_members_counts_fit(engine, mode, way, streaming, source):
    llm = AdaFuseLLM(engine=engine, system_prompt="You know the mill.")
    how: dict[str, Any] = {"response_mode": ResponseMode(mode), "streaming": streaming}
    if source == "helper":
        helper = llm.prompt_helper()
        how = {"response_synthesizer": get_response_synthesizer(llm, helper, **how)}
    elif source == "settings":
        Settings.prompt_helper = llm.prompt_helper()
    else:
        Settings.tokenizer = llm.tokenizer
    query_engine = LONG.as_query_engine(llm=llm, similarity_top_k=NODES, **how)
    with prompts_read(engine) as prompts:
        assert "Eight parts." in await ask(query_engine, way)
    assert mode not in COMPLETE or not missing(engine, prompts)
    if source != "tokenizer":  # the response has its room too
        longest = max(len(ids) for read in prompts.values() for ids in read)
        assert longest + llm.metadata.num_output <= WINDOW


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", ["query", "aquery"])
async def test_a_prompt_that_does_not_fit_ends_the_query_with_what_to_do(engine, way, streaming):
    llm = AdaFuseLLM(engine=engine, context_window=100_000)  # more than the members have
    query_engine = LONG.as_query_engine(llm=llm, similarity_top_k=NODES, streaming=streaming)
    with pytest.raises(ContextWindowError, match=r"set Settings.prompt_helper = "):
        await ask(query_engine, way)


class Report(BaseModel):
    """A report with many parts, of which each is described in some detail."""

    parts: list[str]


def test_replies_that_do_not_fit_the_class_of_the_answers_end_the_query(engine):
    llm = AdaFuseLLM(engine=engine, enforce=False)
    query_engine = LONG.as_query_engine(llm=llm, similarity_top_k=1, output_cls=Report)
    with pytest.raises(MalformedReplyError, match="no valid Report"):
        query_engine.query(QUESTION)


def test_a_prompt_helper_reserves_space_for_the_class_of_the_answers():
    reply = '{"parts": ["a"]}'
    with scripted_engine(lambda prompt: reply, window=WINDOW, max_new_tokens=60) as engine:
        llm = AdaFuseLLM(engine=engine, enforce=False)
        synthesizer = get_response_synthesizer(
            llm,
            llm.prompt_helper(Report),
            response_mode=ResponseMode.TREE_SUMMARIZE,
            output_cls=Report,
        )
        query_engine = LONG.as_query_engine(
            llm=llm, similarity_top_k=NODES, response_synthesizer=synthesizer
        )
        assert str(query_engine.query(QUESTION)) == '{"parts":["a"]}'
