"""Query engines lose no context if prompts are packed by the members' counts."""

import llama_index.core
import pytest
from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.llms.adafuse import AdaFuseLLM

from tests.support.llama_calls import prompts_read
from tests.support.scripted import scripted_engine

WINDOW = 4096
NODES = 8
QUESTION = "Which parts of the mill report are there?"
MARKS = [f"{place}{n}" for place in ("start", "middle", "finish") for n in range(NODES)]


@pytest.fixture(autouse=True)
def untouched_settings(monkeypatch):
    """Core keeps its tokenizer in a global variable."""
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)


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


async def test_prompts_packed_by_the_members_counts_fit(engine, index):
    llm = AdaFuseLLM(engine=engine, system_prompt="You know the mill.")
    Settings.tokenizer = llm.tokenizer
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=NODES)
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
