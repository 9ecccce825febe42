"""LangChain's decision model: answers, states, tracing, branches and errors."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from langchain_core.decisions import Box, Choice, Noul, NoulCriteria, Question, Score
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableBranch
from langchain_core.tracers import LangChainTracer
from langgraph.graph import START, StateGraph
from langsmith import Client

import adafuse_llm
from adafuse_llm import InvalidInputError, InvalidOptionError
from langchain_adafuse import AdaFuseDecisions
from tests.support.deciding import deciding_engine

STATE = "The invoice has a wrong address. Please answer today."
TEAM = Choice(instructions="Which team?", criteria={"technical": None, "billing": ["invoice"]})
QUESTIONS: dict[str, Question] = {
    "urgent": Noul(instructions="Today?", criteria=NoulCriteria(true="a day is named")),
    "team": TEAM,
    "mood": Score(instructions={"ask": "How angry?"}, criteria=["calm", "a wrong word"]),
}
SAME = {
    "urgent": adafuse_llm.Predicate("Today?", yes="a day is named"),
    "team": adafuse_llm.Choice("Which team?", {"technical": "", "billing": '["invoice"]'}),
    "mood": adafuse_llm.Score('{"ask": "How angry?"}', ["calm", "a wrong word"]),
}
IMAGE = {"type": "image", "url": "https://example.org/a.png"}


@pytest.fixture(scope="module")
def model():
    with deciding_engine() as engine:
        yield AdaFuseDecisions(engine=engine)


def asked(state: Any = STATE, questions: Any = QUESTIONS) -> Any:
    return {"state": state, "questions": questions}


@pytest.mark.quick
def test_the_answers_are_those_of_the_engine_in_langchains_types(model):
    response, decision = model.invoke(asked()), model.engine.decide(STATE, SAME)
    assert response.decision == decision
    assert response == model.invoke(asked(questions=SAME))
    assert response.nouls["urgent"].noul == decision["urgent"].probability > 0.5
    team, mood = response.choices["team"], response.scores["mood"]
    assert (team.choice, team.confidence) == ("billing", decision["team"].confidence)
    assert team.probabilities == decision["team"].probabilities
    assert (mood.score, mood.legend) == (decision["mood"].score, {0: "calm", 1: "a wrong word"})
    assert [*mood.probabilities.values()] == [*decision["mood"].probabilities.values()]
    assert response.model == model.model == "oak+elm"


async def test_a_branch_is_an_edge_of_a_graph(model):
    chain = (
        (lambda told: asked(told["text"], {"team": TEAM}))
        | model
        | RunnableBranch(
            (lambda found: found.choices["team"].choice == "billing", lambda _: "billing"),
            lambda _: "technical",
        )
    )
    kind: Any = dict
    graph = StateGraph(kind).add_conditional_edges(START, chain)
    for team in ("billing", "technical"):
        graph.add_node(team, lambda _, team=team: {"team": team})
    texts = [{"text": "My invoice is late."}, {"text": "A technical error."}]
    routed = graph.compile().batch(texts)
    assert routed == [{"team": "billing"}, {"team": "technical"}]
    assert await chain.abatch(texts) == [each["team"] for each in routed]


def test_traces_have_the_usage_and_the_model(model):
    tracer = LangChainTracer(client=MagicMock(Client))
    usage = model.invoke(asked(), {"callbacks": [tracer]}).usage
    run: Any = tracer.latest_run
    assert run.extra["metadata"]["usage_metadata"] == usage
    assert usage["input_tokens"] == usage["total_tokens"] > 0
    assert run.extra["metadata"]["ls_model_name"] == "oak+elm"


def test_states_can_be_messages_and_have_messages(model):
    talk = [HumanMessage("Hi", name="Ada"), AIMessage("Yes?")]
    read = "User: Ada: Hi\n\nAssistant: Yes?"
    for state, text in ((talk, read), ({"last": talk}, {"last": read})):
        found = model.invoke(asked(state, {"team": TEAM}))
        assert found.decision == model.engine.decide(text, {"team": SAME["team"]})


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (asked(questions={"where": Box(instructions="the dog")}), "or score; got 'box'"),
        (asked({"seen": [HumanMessage([IMAGE])]}), "only text; got image"),
        (asked(questions={"q": Noul(instructions=[{**IMAGE, "type": "audio"}])}), "got audio"),
    ],
)
def test_what_members_cannot_read_is_one_error(model, given, named):
    with pytest.raises(InvalidInputError, match=named):
        model.invoke(given)


def test_options_can_be_bound_and_read_from_a_file(model, tmp_path):
    expected = model.engine.decide(STATE, SAME, use=["elm"], orders=1)
    configured = model.configurable_fields(use=ConfigurableField(id="use"))
    for bound in (
        model.bind(model="elm", orders=1, timeout=9, max_words=None, user="Ada"),
        configured.with_config(configurable={"use": ["elm"]}).bind(orders=1),
        AdaFuseDecisions(engine=model.engine, model="elm", orders=1),
    ):
        found: Any = bound.invoke(asked())
        assert (found.model, found.decision) == ("elm", expected)
    for option, value in (("orders", 0), ("max_words", 2)):
        with pytest.raises(InvalidOptionError, match=f"'{option}'"):
            model.invoke(asked(), **{option: value})
    path = tmp_path / "config.yaml"
    path.write_text("{weights: [1, 0], max_new_tokens: 8, decisions: {weights: {oak: 1, elm: 0}}}")
    loaded: Any = AdaFuseDecisions.from_config(path, members=None, engine=model.engine)
    for options, rule in (({}, "calibrated"), ({"weights": [0, 1]}, "weights")):
        assert loaded.invoke(asked(), **options).decision.strategy == rule
