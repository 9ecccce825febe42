"""Query engines lose no context if prompts are packed by the members' counts."""

from typing import Any

import pytest
from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import TextNode
from llama_index.llms.adafuse import AdaFuseLLM
from pydantic import BaseModel

from tests.support.llama_calls import prompts_read
from tests.support.scripted import scripted_engine

WINDOW = 4096
NODES = 8
QUESTION = "Which parts of the mill report are there?"
MARKS = [f"{place}{n}" for place in ("start", "middle", "finish") for n in range(NODES)]


@pytest.fixture(autouse=True)
def untouched_settings(monkeypatch):
    """Core keeps its prompt helper in global variables."""
    for name in ("_prompt_helper", "_chat_prompt_helper"):
        monkeypatch.setattr(Settings, name, None)


@pytest.fixture(scope="module")
def index():
    """Nodes with 100 lines each, and marks at three places."""
    nodes = []
    for number in range(NODES):
        lines = [f"mill {number} report word{word}" for word in range(100)]
        lines[50] = f"middle{number}"
        nodes.append(TextNode(text=" ".join([f"start{number}", *lines, f"finish{number}"])))
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(8))


@pytest.fixture(scope="module")
def engine():
    with scripted_engine(lambda prompt: "Eight parts.", window=WINDOW, max_new_tokens=60) as engine:
        yield engine


@pytest.mark.parametrize("mode", ["compact", "refine"])
async def test_prompts_packed_by_the_members_counts_fit(engine, index, mode):
    llm = AdaFuseLLM(engine=engine, system_prompt="You know the mill.")
    how: dict[str, Any] = {"response_mode": ResponseMode(mode)}
    if mode == "compact":
        Settings.prompt_helper = llm.prompt_helper()
    else:
        synthesizer = get_response_synthesizer(llm, llm.prompt_helper(), **how)
        how = {"response_synthesizer": synthesizer}
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=NODES, **how)
    with prompts_read(engine) as prompts:
        assert "Eight parts." in str(await query_engine.aquery(QUESTION))
    for backend in engine.backends:
        read = prompts[backend.name]
        text = "\n".join(backend.codec.decode_continuation((), ids) for ids in read)
        assert [mark for mark in MARKS if mark not in text] == []
        assert max(map(len, read)) + llm.metadata.num_output <= WINDOW


def test_a_text_counts_as_many_tokens_as_the_member_that_needs_the_most(engine):
    text = "The middle of the mill report"
    sizes = {len(ids) for ids in engine.encode_text(text).values()}
    assert len(sizes) == 2
    assert len(AdaFuseLLM(engine=engine).tokenizer(text)) == max(sizes)


class Report(BaseModel):
    """A report with many parts, of which each is described in some detail."""

    parts: list[str]


def test_a_prompt_helper_reserves_space_for_the_class_of_the_answers(index):
    reply = '{"parts": ["a"]}'
    with scripted_engine(lambda prompt: reply, window=WINDOW, max_new_tokens=60) as engine:
        llm = AdaFuseLLM(engine=engine, enforce=False)
        synthesizer = get_response_synthesizer(
            llm,
            llm.prompt_helper(Report),
            response_mode=ResponseMode.TREE_SUMMARIZE,
            output_cls=Report,
        )
        query_engine = index.as_query_engine(
            llm=llm, similarity_top_k=NODES, response_synthesizer=synthesizer
        )
        assert str(query_engine.query(QUESTION)) == '{"parts":["a"]}'
