"""Questions about the shipped handbook, answered from what was retrieved, without a network."""

from __future__ import annotations

import os

import pytest
import pytest_socket
from llama_index.core import VectorStoreIndex
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import TextNode
from llama_index.llms.adafuse import AdaFuseLLM
from llama_index.retrievers.bm25 import BM25Retriever

from adafuse_llm.documents import INSTRUCTION, read_documents
from adafuse_llm.embedded import handbook_path, handbook_questions
from tests.support.hashing import HashingEmbedding
from tests.support.llama_calls import recorded

QUESTIONS = [each for each in handbook_questions() if each.source is not None]
TEMPLATE = PromptTemplate(f"{INSTRUCTION}\n\n{{context_str}}\n\nQuestion: {{query_str}}")
ENOUGH = 0.8
"""Share of the answers that has to be right; the members are very small."""


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("TIKTOKEN_CACHE_DIR", "NLTK_DATA"):
        monkeypatch.delenv(name, raising=False)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    pytest_socket.disable_socket(allow_unix_socket=True)
    yield
    pytest_socket.enable_socket()


@pytest.fixture(scope="module")
def llm():
    return AdaFuseLLM.from_embedded(max_new_tokens=40, max_words=1)


@pytest.fixture(scope="module")
def nodes():
    return [
        TextNode(
            text=passage.text,
            metadata={"source": passage.source},
            excluded_llm_metadata_keys=["source"],
        )
        for passage in read_documents([handbook_path()])
    ]


@pytest.fixture(scope="module")
def retrievers(nodes):
    def make(name, llm):
        bm25 = BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=2)
        vector = VectorStoreIndex(nodes, embed_model=HashingEmbedding())
        if name == "bm25":
            return bm25
        return QueryFusionRetriever(
            [bm25, vector.as_retriever(similarity_top_k=2)],
            llm=llm,
            mode=FUSION_MODES.RECIPROCAL_RANK,
            num_queries=1,
            similarity_top_k=2,
        )

    return make


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["bm25", "fusion"])
async def test_the_embedded_questions_are_answered_with_sources_and_rounds(llm, retrievers, name):
    engine = RetrieverQueryEngine.from_args(
        retrievers(name, llm), llm=llm, text_qa_template=TEMPLATE
    )
    asked = QUESTIONS[::12]
    right = 0
    for each in asked:
        with recorded() as record:
            response = await engine.aquery(each.question)
        right += str(response) == each.answer
        assert each.source in {node.metadata["source"] for node in response.source_nodes}
        rounds = record.named("AdaFuseRoundEvent")
        assert "".join(event.text for event in rounds).strip() == str(response)
    assert right >= ENOUGH * len(asked)
