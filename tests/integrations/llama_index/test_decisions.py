"""LlamaIndex's selector and filter, in a router and in a query engine of core."""

from typing import Any

import pytest
from llama_index.core import MockEmbedding, Response, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import CustomQueryEngine, RouterQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.adafuse import AdaFuseLLM, AdaFuseRelevance, AdaFuseSelector
from pydantic import ValidationError

from adafuse_llm import InvalidInputError, InvalidOptionError
from tests.support.deciding import deciding_engine

DESCRIPTIONS = ["prices for visitors", "founders and\ndirectors of museums", "opening hours"]
PASSAGES = ["The founder was Jory.", "A ticket costs 5 crowns.", "Opened by the founder's sister."]
BOTH = "Which prices, and which opening hours?"


@pytest.fixture(scope="module")
def llm():
    with deciding_engine() as engine:
        yield AdaFuseLLM(engine=engine)


class Source(CustomQueryEngine):
    """A source that answers with its own name."""

    name: str

    def custom_query(self, query_str: str) -> Any:
        return Response(self.name)


async def test_a_router_asks_the_selected_sources(llm):
    tools = [
        QueryEngineTool.from_defaults(Source(name=text[:6]), description=text)
        for text in DESCRIPTIONS
    ]
    for threshold, selected in ((1.0, [0]), (0.3, [0, 2]), (0.0, [0, 2, 1])):
        router = RouterQueryEngine(AdaFuseSelector(llm, threshold), tools, llm=MockLLM())
        responses: list[Any] = [router.query(BOTH), await router.aquery(BOTH)]
        for response in responses:
            assert response.metadata["selector_result"].inds == selected
            assert len(selected) > 1 or str(response) == "prices"


@pytest.mark.quick
def test_the_options_of_the_llm_apply_to_decisions(llm):
    fit = {"weights": {"oak": 0, "elm": 1}}
    for options, reason in (
        ({"use": ["elm"], "temperature": 0.5, "request_timeout": 9}, "probability 0.833"),
        ({"weights": [1, 0], "decisions": fit}, "probability 0.833"),
    ):
        selector = AdaFuseSelector(AdaFuseLLM(engine=llm.engine, **options))
        assert selector.select(DESCRIPTIONS, "Which museums?").reason == reason


@pytest.mark.parametrize("kind", [AdaFuseSelector, AdaFuseRelevance])
def test_an_llm_is_passed_whole_or_as_its_fields_with_a_threshold(kind, llm):
    kind(engine=llm.engine)
    for threshold in (-0.01, 1.01):
        with pytest.raises((InvalidOptionError, ValidationError), match="threshold"):
            kind(llm=llm, threshold=threshold)
    with pytest.raises(InvalidInputError, match="use"):
        kind(llm=llm, use=["elm"])
    with pytest.raises(InvalidInputError, match="engine="):
        kind(llm=llm.engine)


async def test_a_query_engine_answers_from_the_passages_that_remain(llm):
    index = VectorStoreIndex(
        [TextNode(text=text, id_=text[:6]) for text in PASSAGES], embed_model=MockEmbedding(8)
    )
    gate = AdaFuseRelevance(llm=llm)
    asking = index.as_query_engine(llm=MockLLM(), similarity_top_k=3, node_postprocessors=[gate])
    for response in (asking.query("The founder?"), await asking.aquery("The founder?")):
        assert {node.node_id for node in response.source_nodes} == {"The fo", "Opened"}


@pytest.mark.quick
def test_passages_are_sorted_by_probability_and_cut(llm):
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.1) for text in PASSAGES[1::-1]]
    ranking = AdaFuseRelevance(llm=llm, threshold=0, top_n=1)
    (kept,) = ranking.postprocess_nodes(nodes, query_str="the founder")
    assert (kept.text, nodes[1].score) == (PASSAGES[0], 0.1)
    with pytest.raises(InvalidInputError, match="pass query_str="):
        ranking.postprocess_nodes([])
