"""Query engines lose no context: the members read all of it, or the caller gets an error."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import TextNode
from llama_index.llms.adafuse import AdaFuseLLM, AdaFuseLLMError

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    AdaFuseError,
    ContextWindowError,
    MalformedReplyError,
)
from tests.support.hashing import HashingEmbedding
from tests.support.llama_calls import prompts_read
from tests.support.models import CHATML
from tests.support.scripted import scripted, scripted_engine

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


INDEXES = {"short": index_of(25), "long": index_of(100)}

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


@pytest.mark.sweep(5)
@pytest.mark.parametrize("length", INDEXES)
@pytest.mark.parametrize(("mode", "way", "streaming"), WAYS)
async def test_l1_a_default_query_engine_reads_the_whole_context_or_raises(
    engine, mode, way, streaming, length
):
    llm = AdaFuseLLM(engine=engine)
    query_engine = INDEXES[length].as_query_engine(
        llm=llm, similarity_top_k=NODES, response_mode=ResponseMode(mode), streaming=streaming
    )
    with prompts_read(engine) as prompts:
        try:
            text = await ask(query_engine, way)
        except AdaFuseError as error:
            assert length == "long"
            assert isinstance(error, AdaFuseLLMError)
            assert not isinstance(error, (ValueError, TypeError))
            assert isinstance(error.__cause__, ContextWindowError)
            assert "Settings.prompt_helper = llm.prompt_helper()" in str(error)
            assert "Settings.tokenizer = llm.tokenizer" in str(error)
            return
    assert "Eight parts." in text
    assert "Empty Response" not in text
    assert mode not in COMPLETE or not missing(engine, prompts)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("mode", "way", "streaming", "source"),
    [
        *((*way, "settings") for way in WAYS if (way[1] == "aquery") == way[2]),
        *((mode, "query", False, source) for mode in READING for source in ("helper", "tokenizer")),
    ],
)
async def test_l1_prompts_packed_by_the_members_counts_fit(engine, mode, way, streaming, source):
    llm = AdaFuseLLM(engine=engine, system_prompt="You know the mill.")
    how: dict[str, Any] = {"response_mode": ResponseMode(mode), "streaming": streaming}
    if source == "helper":
        helper = llm.prompt_helper()
        how = {"response_synthesizer": get_response_synthesizer(llm, helper, **how)}
    elif source == "settings":
        Settings.prompt_helper = llm.prompt_helper()
    else:
        Settings.tokenizer = llm.tokenizer
    query_engine = INDEXES["long"].as_query_engine(llm=llm, similarity_top_k=NODES, **how)
    with prompts_read(engine) as prompts:
        assert "Eight parts." in await ask(query_engine, way)
    assert mode not in COMPLETE or not missing(engine, prompts)
    if source != "tokenizer":  # the response has its room too
        longest = max(len(ids) for read in prompts.values() for ids in read)
        assert longest + llm.metadata.num_output <= WINDOW


class Report(BaseModel):
    """A report about a mill."""

    answer: str


@pytest.mark.parametrize(("mode", "way", "streaming"), WAYS)
async def test_l1_a_malformed_reply_is_no_empty_response(engine, mode, way, streaming):
    """The members never write the requested JSON."""
    query_engine = INDEXES["short"].as_query_engine(
        llm=AdaFuseLLM(engine=engine, retries=0, enforce=False),
        similarity_top_k=2,
        response_mode=ResponseMode(mode),
        streaming=streaming,
        output_cls=Report,
    )
    if mode == "simple_summarize" or (mode == "tree_summarize" and streaming):
        assert "Eight parts." in await ask(query_engine, way)  # core ignores the class here
        return
    with pytest.raises(AdaFuseLLMError) as caught:
        await ask(query_engine, way)
    assert isinstance(caught.value.__cause__, MalformedReplyError)


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", ["chat", "achat", "stream_chat", "astream_chat"])
@pytest.mark.parametrize("mode", ["context", "condense_plus_context", "condense_question"])
async def test_l1_a_default_chat_engine_reads_the_whole_context_or_raises(engine, mode, way):
    chat_engine = INDEXES["long"].as_chat_engine(
        ChatMode(mode), AdaFuseLLM(engine=engine), similarity_top_k=NODES
    )
    with prompts_read(engine) as prompts:
        try:
            given = getattr(chat_engine, way)(QUESTION)
            response = await given if way.startswith("a") else given
            if way == "astream_chat":
                text = "".join([token async for token in response.async_response_gen()])
            else:
                text = "".join(response.response_gen) if way == "stream_chat" else str(response)
        except AdaFuseLLMError as error:
            assert isinstance(error.__cause__, ContextWindowError)
            return
    assert "Eight parts." in text
    assert not missing(engine, prompts)


ENGLISH = "Who founded the mill, and what did it cost?\n\nJenbert Zalwyn did; 你好 🐙."


@pytest.mark.quick
def test_l1_the_tokenizer_counts_at_the_member_with_most_tokens(engine):
    llm = AdaFuseLLM(engine=engine)
    for text in ("", ENGLISH, *ENGLISH.split(" ")):
        counts = {
            backend.name: len(backend.codec.encode_prompt("\n" + text))
            - len(backend.codec.encode_prompt("\n"))
            for backend in engine.backends
        }
        assert len(llm.tokenizer(text)) == max(counts.values())
        for name, count in counts.items():
            assert len(AdaFuseLLM(engine=engine, use=[name]).tokenizer(text)) == count
    Settings.tokenizer = llm.tokenizer
    assert len(Settings.tokenizer(ENGLISH)) == len(llm.tokenizer(ENGLISH))


FORMS_OF_PROMPTS: list[dict[str, Any]] = [
    {},
    {"system_prompt": "You know the mill. " * 20},
    {"query_wrapper_prompt": "Read this with great care. {query_str}"},
    {"messages_to_prompt": lambda messages: f"{[m.content for m in messages]}\nAnswer:"},
    {"use": ["quill"]},
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("options", "template"),
    [
        *((options, template) for options in FORMS_OF_PROMPTS for template in (True, False)),
        ({"chat_template_kwargs": {"note": "Read with great care. " * 20}}, True),
    ],
)
def test_l1_a_prompt_helper_fills_the_window_and_no_more(options, template):
    """Each prompt of a tree summary is nearly as long as the window allows."""
    noted = "{{ note }}\n" + CHATML
    how: dict[str, Any] = {"template": noted if template else None, "window": 1500}
    members = [
        scripted(lambda prompt: "Yes.", "bytelevel", name="ink", **how),
        scripted(lambda prompt: "Yes.", "sentencepiece", name="quill", **how),
    ]
    with AdaFuseEngine(members, AdaFuseConfig(max_new_tokens=60)) as engine:
        llm = AdaFuseLLM(engine=engine, **options)
        synthesizer = get_response_synthesizer(
            llm, llm.prompt_helper(), response_mode=ResponseMode.TREE_SUMMARIZE
        )
        text = " ".join(f"mill report word{word}" for word in range(300))
        with prompts_read(engine) as prompts:
            assert "Yes." in str(synthesizer.get_response(QUESTION, [text]))
    lengths = [len(ids) for read in prompts.values() for ids in read]
    assert 1500 - 60 - 150 <= max(lengths) <= 1500 - 60
