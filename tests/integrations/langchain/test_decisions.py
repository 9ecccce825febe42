"""LangChain's decision model: answers, states, tracing, branches, graphs and errors."""

from typing import Any, TypedDict
from unittest.mock import MagicMock

import pytest
from langchain_core.decisions import Box, Choice, Noul, NoulCriteria, Question, Score
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import ConfigurableField, RunnableBranch, RunnablePassthrough
from langchain_core.tracers import LangChainTracer
from langgraph.graph import END, START, StateGraph
from langsmith import Client

import adafuse_llm
from adafuse_llm import InvalidInputError, InvalidOptionError
from langchain_adafuse import AdaFuseDecisions, ChatAdaFuse
from tests.support.deciding import deciding_engine

STATE = "The invoice has a wrong address. Please answer today."
TEAM = Choice(
    instructions="Which team?", criteria={"technical": None, "billing": {"about": ["invoice"]}}
)
QUESTIONS: dict[str, Question] = {
    "urgent": Noul(instructions="Today?", criteria=NoulCriteria(true="a day is named")),
    "team": TEAM,
    "mood": Score(instructions={"ask": "How angry?"}, criteria=["calm", "a wrong word", "furious"]),
}
SAME = {
    "urgent": adafuse_llm.Predicate("Today?", yes="a day is named"),
    "team": adafuse_llm.Choice(
        "Which team?", {"technical": "", "billing": '{"about": ["invoice"]}'}
    ),
    "mood": adafuse_llm.Score('{"ask": "How angry?"}', ["calm", "a wrong word", "furious"]),
}
IMAGE = {"type": "image", "url": "https://example.org/a.png"}


@pytest.fixture(scope="module")
def engine():
    with deciding_engine() as engine:
        yield engine


@pytest.fixture
def model(engine):
    return AdaFuseDecisions(engine=engine)


def asked(state: Any = STATE, questions: Any = QUESTIONS) -> Any:
    return {"state": state, "questions": questions}


@pytest.mark.quick
def test_the_answers_are_those_of_the_engine_in_langchains_types(model, engine):
    response, decision = model.invoke(asked()), engine.decide(STATE, SAME)
    assert response.decision == decision
    assert response.nouls["urgent"].noul == decision["urgent"].probability > 0.5
    team, mood = response.choices["team"], response.scores["mood"]
    assert (team.choice, team.confidence) == ("billing", decision["team"].confidence)
    assert team.probabilities == decision["team"].probabilities
    assert mood.score == decision["mood"].score
    assert mood.legend == {0: "calm", 1: "a wrong word", 2: "furious"}
    assert [*mood.probabilities.values()] == [*decision["mood"].probabilities.values()]
    assert response.model == model.model == "oak+elm"


async def test_batches_and_asynchronous_calls_give_the_same(model):
    inputs = [asked(), asked("The printer shows a technical error.", {"team": TEAM})]
    found = [model.invoke(each) for each in inputs]
    assert model.batch(inputs) == await model.abatch(inputs) == found
    assert await model.ainvoke(inputs[0]) == found[0]


class Ticket(TypedDict, total=False):
    text: str
    done_by: str


async def test_it_routes_branches_and_graphs(model):
    async def team(ticket: Ticket) -> str:
        found = await model.ainvoke(asked(ticket["text"], {"team": TEAM}))
        return found.choices["team"].choice

    chain = RunnablePassthrough.assign(
        found=(lambda ticket: asked(ticket["text"], {"team": TEAM})) | model
    ) | RunnableBranch(
        (lambda ticket: ticket["found"].choices["team"].choice == "billing", lambda _: "billing"),
        lambda _: "technical",
    )
    graph = StateGraph(Ticket)
    for name in ("billing", "technical"):
        graph.add_node(name, lambda _, name=name: {"done_by": name})
        graph.add_edge(name, END)
    routed = graph.add_conditional_edges(START, team).compile()
    for text, name in (("My invoice is late.", "billing"), ("A technical error.", "technical")):
        assert (await routed.ainvoke({"text": text}))["done_by"] == name
        assert chain.invoke({"text": text}) == name


def test_traces_have_the_usage_and_the_model(model):
    tracer = LangChainTracer(client=MagicMock(Client))
    usage = model.invoke(asked(), {"callbacks": [tracer]}).usage
    run: Any = tracer.latest_run
    assert run.run_type == "llm"
    assert run.extra["metadata"]["usage_metadata"] == usage
    assert usage["input_tokens"] == usage["total_tokens"] > 0
    assert run.extra["metadata"]["ls_provider"] == "adafuse"
    assert run.extra["metadata"]["ls_model_name"] == "oak+elm"


CALL = {"id": "1", "name": "look_up"}
ASKING: Any = AIMessage("", tool_calls=[{**CALL, "args": {"of": "invoice"}}])


@pytest.mark.parametrize(
    ("state", "read"),
    [
        (HumanMessage("Hi"), [{"role": "user", "content": "Hi"}]),
        ({"last": [HumanMessage("Hi")]}, {"last": [{"role": "user", "content": "Hi"}]}),
        (
            [ASKING, ToolMessage("none", tool_call_id="1")],
            [
                {"role": "assistant", "tool_calls": [{**CALL, "arguments": {"of": "invoice"}}]},
                {"role": "tool", "content": "none", "tool_call_id": "1"},
            ],
        ),
    ],
)
def test_states_can_be_messages_and_have_messages(model, engine, state, read):
    found = model.invoke(asked(state, {"team": TEAM}))
    assert found.decision == engine.decide(read, {"team": SAME["team"]})


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (asked(questions={"where": Box(instructions="the dog")}), "a Box as question 'where'"),
        (asked(questions={"team": {"type": "noul"}}), "a dict as question 'team'"),
        (asked([HumanMessage([IMAGE])]), "only text; got image"),
        (asked({"seen": IMAGE}), "only text; got image"),
        (asked(questions={"q": Noul(instructions=[{**IMAGE, "type": "audio"}])}), "got audio"),
        (asked(questions={"q": Choice(instructions="?", criteria={"a": 1})}), "2 to 255 different"),
    ],
)
def test_what_members_cannot_read_is_one_error_before_any_compute(given, named):
    with deciding_engine("oak") as engine:
        with pytest.raises(InvalidInputError, match=named):
            AdaFuseDecisions(engine=engine).invoke(given)
        member: Any = engine.backends[0]
        assert member.passes == 0


def test_a_state_that_does_not_fit_is_langchains_error():
    with (
        deciding_engine("oak", context_window=90) as engine,
        pytest.raises(ContextOverflowError, match="the state with question 'team'"),
    ):
        AdaFuseDecisions(engine=engine).invoke(asked(STATE, {"team": TEAM}))


def test_every_call_can_have_its_own_options(model, engine):
    own = {"use": ["elm"], "orders": 1, "timeout": 9}
    expected = engine.decide(STATE, SAME, **own)
    configured = model.configurable_fields(use=ConfigurableField(id="use"))
    for found in (
        model.invoke(asked(), **own),
        model.bind(**own).invoke(asked()),
        model.batch([asked()], **own)[0],
        configured.with_config(configurable={"use": ["elm"]}).invoke(asked(), orders=1),
        AdaFuseDecisions(engine=engine, model="elm", orders=1).invoke(asked()),
    ):
        assert (found.model, found.decision) == ("elm", expected)
    for options, named in (
        ({"temperature": 1}, "decide has no option 'temperature'"),
        ({"orders": 0}, "'orders'"),
        ({"use": "ash"}, "no member 'ash'"),
    ):
        with pytest.raises(InvalidOptionError, match=named):
            model.invoke(asked(), **options)


def test_members_are_shared_with_the_chat_model_and_load_late(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("use: [wren, heron]\nweights: {wren: 1, heron: 2}\nmax_new_tokens: 8\n")
    model = AdaFuseDecisions.from_config(path, orders=1)
    assert (model.model, model.orders, model.max_new_tokens) == ("wren+heron", 1, None)
    chat = ChatAdaFuse.from_config(path)
    chat.unload()
    assert not model._ensemble.is_loaded
    assert model.warmup()._ensemble.engine() is chat._ensemble.engine()
    assert model.invoke(asked()).decision.strategy == "weights"
    model.unload()
