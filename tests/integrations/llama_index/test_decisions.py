"""LlamaIndex's selector and filter, in a router and in a query engine of core."""

from typing import Any

import pytest
from llama_index.core import MockEmbedding, Response, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import CustomQueryEngine, RouterQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.adafuse import AdaFuseLLM, AdaFuseRelevance, AdaFuseSelector

from adafuse_llm import InvalidInputError, InvalidOptionError
from tests.support.deciding import deciding_engine

PRICES, PEOPLE = "prices of tickets for visitors", "founders and\ndirectors of museums"
DESCRIPTIONS = [PRICES, PEOPLE, "opening hours"]
PASSAGES = ["The founder was Jory.", "A ticket costs 5 crowns.", "Opened by the founder's sister."]


@pytest.fixture(scope="module")
def engine():
    with deciding_engine() as engine:
        yield engine


class Source(CustomQueryEngine):
    """A source that answers with its own name."""

    name: str

    def custom_query(self, query_str: str) -> Any:
        return Response(self.name)


def router(selector: AdaFuseSelector) -> RouterQueryEngine:
    tools = [
        QueryEngineTool.from_defaults(Source(name=text[:6]), description=text)
        for text in DESCRIPTIONS
    ]
    return RouterQueryEngine(selector, tools, llm=MockLLM())


@pytest.mark.parametrize(
    ("threshold", "query", "selected"),
    [
        (None, "Which museums have directors?", [1]),
        (None, "What do tickets cost, and which are the opening hours?", [0]),
        (0.5, "What do tickets cost, and which are the opening hours?", [0, 2]),
        (0.99, "What do tickets cost?", [0]),
        (0.0, "What do tickets cost?", [0, 1, 2]),
    ],
)
async def test_a_router_asks_the_selected_sources(engine, threshold, query, selected):
    routing = router(AdaFuseSelector(engine=engine, threshold=threshold))
    responses: list[Any] = [routing.query(query), await routing.aquery(query)]
    for response in responses:
        found = response.metadata["selector_result"]
        assert found.inds == selected
        if len(selected) == 1:
            assert str(response) == DESCRIPTIONS[selected[0]][:6]


@pytest.mark.quick
def test_a_selection_does_not_change_with_the_order_of_the_choices(engine):
    selector = AdaFuseSelector(engine=engine)
    found = [
        selector.select(texts, "Which museums?") for texts in (DESCRIPTIONS, DESCRIPTIONS[::-1])
    ]
    assert [each.ind for each in found] == [1, 1]
    assert found[0].reason == found[1].reason


@pytest.mark.quick
def test_the_options_of_a_given_llm_apply_to_decisions(engine):
    sure = AdaFuseLLM(engine=engine, use=["elm"], temperature=0.5, request_timeout=9)
    weak = AdaFuseLLM(engine=engine, use=["oak"])
    reasons = [
        AdaFuseSelector(llm, question="Which?").select(DESCRIPTIONS, "Which museums?").reason
        for llm in (sure, weak)
    ]
    assert reasons == ["probability 0.833", "probability 0.714"]


async def test_a_query_engine_answers_from_the_passages_that_remain(engine):
    index = VectorStoreIndex(
        [TextNode(text=text, id_=text[:6]) for text in PASSAGES], embed_model=MockEmbedding(8)
    )
    relevance = AdaFuseRelevance(engine=engine)
    asking = index.as_query_engine(
        llm=MockLLM(), similarity_top_k=3, node_postprocessors=[relevance]
    )
    for response in (asking.query("The founder?"), await asking.aquery("The founder?")):
        assert {node.node_id for node in response.source_nodes} == {"The fo", "Opened"}
        assert {round(node.get_score(), 3) for node in response.source_nodes} == {0.876}


@pytest.mark.quick
def test_passages_are_sorted_by_probability_and_cut(engine):
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.1) for text in PASSAGES[1::-1]]
    ranking = AdaFuseRelevance(engine=engine, threshold=0, top_n=1, question="Is {query_str} here?")
    (kept,) = ranking.postprocess_nodes(nodes, query_str="the founder")
    assert (kept.text, nodes[1].score) == (PASSAGES[0], 0.1)
    assert ranking.postprocess_nodes([], query_str="the founder") == []
    assert AdaFuseRelevance(engine=engine).postprocess_nodes(nodes[:1], query_str="founder") == []


@pytest.mark.quick
@pytest.mark.parametrize("kind", [AdaFuseRelevance, AdaFuseSelector])
def test_members_are_given_once(kind, engine):
    assert kind(members=["a/b", "c/d"])._llm._model_name == "b+d"
    for given in ({"llm": AdaFuseLLM(engine=engine), "engine": engine}, {"llm": engine}):
        with pytest.raises(InvalidInputError, match="only one of llm="):
            kind(**given)


@pytest.mark.quick
def test_a_filter_needs_a_query_and_a_place_for_it(engine):
    with pytest.raises(InvalidOptionError, match=r"must contain \{query_str\}; got 'Is it\?'"):
        AdaFuseRelevance(engine=engine, question="Is it?")
    with pytest.raises(InvalidInputError, match="pass query_str="):
        AdaFuseRelevance(engine=engine).postprocess_nodes([])
