"""Every round is told, on the run of the model that played it."""

from __future__ import annotations

import json
import warnings
from functools import reduce
from operator import add
from typing import Any, TypedDict

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.graph import END, START, MessagesState, StateGraph

from adafuse_llm import InvalidInputError, MissingDependencyError
from langchain_adafuse import ChatAdaFuse, RoundCallbackHandler, get_round_callback


class Recorder(BaseCallbackHandler):
    """Remembers runs of models and rounds, with their ids."""

    def __init__(self):
        self.models = []
        self.rounds = []

    def on_llm_start(self, serialized, prompts, *, run_id, **kwargs):
        self.models.append(run_id)

    def on_chat_model_start(self, serialized, messages, *, run_id, **kwargs):
        self.models.append(run_id)

    def on_llm_new_token(self, token, *, chunk=None, run_id, **kwargs):
        self.rounds += [(run_id, each) for each in chunk.rounds]


async def invoke(runnable, given, config):
    return runnable.invoke(given, config)


async def ainvoke(runnable, given, config):
    return await runnable.ainvoke(given, config)


async def stream(runnable, given, config):
    return list(runnable.stream(given, config))


async def astream(runnable, given, config):
    return [chunk async for chunk in runnable.astream(given, config)]


async def events(runnable, given, config):
    return [event async for event in runnable.astream_events(given, config, version="v2")]


async def batch(runnable, given, config):
    return runnable.batch([given], config)


async def abatch(runnable, given, config):
    return await runnable.abatch([given], config)


@pytest.mark.parametrize("way", [invoke, stream, ainvoke, astream, events, batch, abatch])
async def test_rounds_arrive_with_the_tokens_of_the_models_own_run(model, way):
    chain = PromptTemplate.from_template("{input}") | model
    runnable: Any = chain | RunnableLambda(lambda reply: reply)
    given: Any = {"input": "Hi"}
    recorder = Recorder()
    rounds = RoundCallbackHandler()
    await way(runnable, given, {"callbacks": [recorder, rounds]})
    assert len(recorder.models) == 1
    assert len(recorder.rounds) > 1
    assert {run for run, _ in recorder.rounds} == set(recorder.models)
    assert [data["round"] for _, data in recorder.rounds] == list(range(len(recorder.rounds)))
    assert [each["round"] for each in rounds.rounds] == list(range(len(recorder.rounds)))
    assert {each["run_id"] for each in rounds.rounds} == {str(recorder.models[0])}
    assert "".join(each["text"] for each in rounds.rounds).strip() == (
        "Good day to you, and welcome."
    )


@pytest.mark.quick
def test_records_ride_on_chunks_and_merge_to_the_list(chat):
    with get_round_callback() as rounds:
        chunks = list(chat.stream("Hi", round_detail="full"))
    assert [len(chunk.additional_kwargs["adafuse_rounds"]) for chunk in chunks] == [1] * len(chunks)
    merged = reduce(add, chunks).additional_kwargs["adafuse_rounds"]
    assert merged == [{k: v for k, v in r.items() if k != "run_id"} for r in rounds.rounds]
    assert json.loads(json.dumps(merged, allow_nan=False)) == merged
    assert {"candidates", "margins", "winner", "score"} <= set(merged[0])
    whole = chat.invoke("Hi", round_detail="full").additional_kwargs["adafuse_rounds"]
    assert [each["text"] for each in whole] == [each["text"] for each in merged]


@pytest.mark.quick
def test_records_ride_on_generations(llm):
    chunks = list(llm._stream("Hi", round_detail="full"))
    merged = reduce(add, chunks)
    assert len(merged.generation_info["adafuse_rounds"]) == len(chunks)
    assert merged.generation_info["finish_reason"] == "stop"
    with get_round_callback() as rounds:
        result = llm.generate(["Hi", "Hey", "Hello"], round_detail="full")
    for number, (generation,) in enumerate(result.generations):
        told = generation.generation_info["adafuse_rounds"]
        assert "".join(each["text"] for each in told) == generation.text
        mine = [each for each in rounds.rounds if each["prompt"] == number]
        assert [each["text"] for each in mine] == [each["text"] for each in told]


def test_how_much_is_told(model):
    for detail in ("none", "summary", "full"):
        with get_round_callback() as rounds:
            model.invoke("Hi", round_detail=detail)
        assert bool(rounds.rounds) == (detail != "none")
        assert all("candidates" in each for each in rounds.rounds)
        message = ChatAdaFuse(engine=model.engine, round_detail=detail).invoke("Hi")
        assert ("adafuse_rounds" in message.additional_kwargs) == (detail == "full")
        assert ("adafuse_summary" in message.response_metadata) == (detail != "none")


@pytest.mark.quick
def test_rounds_in_figures_and_as_a_table(chat):
    with get_round_callback() as rounds:
        both = chat.batch(["Hi", "Hey"])
    summary = rounds.summary()
    assert summary.rounds == len(rounds.rounds)
    assert summary.backed == {"ink": summary.rounds, "quill": summary.rounds}
    assert summary.decided == {"ink": 0, "quill": 0}
    assert summary.agreement == 1
    assert sum(summary.words_per_round.values()) == summary.rounds - 2, "two only end the reply"
    assert set(summary.mean_margin) == {"ink", "quill"}
    table = rounds.to_dataframe()
    assert len(table) == summary.rounds
    assert list(table.groupby("response")["text"].sum().str.strip()) == [
        reply.text for reply in both
    ]
    with get_round_callback() as brief:
        chat.invoke("Hi", round_detail="summary")
    assert brief.summary().agreement == 1


@pytest.mark.quick
def test_rounds_as_a_page_and_in_a_notebook(chat, llm, tmp_path):
    with get_round_callback() as rounds:
        reply = chat.invoke("Hi")
        llm.generate(["Hi", "Hey"], max_new_tokens=1)
    page = rounds.to_html(tmp_path / "rounds.html", title="Hi").read_text()
    assert rounds._repr_html_().count("<h2>Response ") == page.count("<h2>Response ") == 3
    first, second, _ = page.split("<h2>Response ")[1:]
    assert f">{reply.usage_metadata['input_tokens']}<" in first
    assert ("limit" in first, "limit" in second) == (False, True)
    with pytest.raises(InvalidInputError, match="no rounds"):
        RoundCallbackHandler().to_html(tmp_path / "none.html")


def test_a_table_without_pandas_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[dataframe\]"):
        RoundCallbackHandler().to_dataframe()


def test_rounds_of_parallel_nodes_name_their_runs_and_leave_the_custom_stream_alone(model):
    class Both(TypedDict):
        input: str
        left: str
        right: str

    graph = StateGraph(Both)
    for key, words in (("left", "Hi"), ("right", "What is it?")):
        graph.add_node(
            f"say_{key}", lambda _, key=key, words=words: {key: str(model.invoke(words))}
        )
        graph.add_edge(START, f"say_{key}")
        graph.add_edge(f"say_{key}", END)
    app: Any = graph.compile()
    recorder = Recorder()
    assert not list(app.stream({"input": ""}, {"callbacks": [recorder]}, stream_mode="custom"))
    assert len(recorder.models) == 2
    for run in recorder.models:
        mine = [each["round"] for at, each in recorder.rounds if at == run]
        assert mine == list(range(len(mine)))
        assert len(mine) > 1


@pytest.mark.parametrize("options", [{"disable_streaming": True}, {"temperature": 1, "n": 2}])
def test_a_graph_streams_only_what_the_user_lets_it_stream(obliging, options):
    chat = ChatAdaFuse(engine=obliging, **options)
    graph = StateGraph(MessagesState)
    graph.add_node("say", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_edge(START, "say")
    graph.add_edge("say", END)
    app: Any = graph.compile()
    given = {"messages": [HumanMessage("Hi")]}
    with get_round_callback() as rounds:
        streamed = [message for message, _ in app.stream(given, stream_mode="messages")]
    assert [type(message) for message in streamed] == [AIMessage]
    first = [each["text"] for each in rounds.rounds if not each.get("response")]
    assert "".join(first).strip() == streamed[0].text


def test_rounds_of_the_event_protocol_arrive_once(chat):
    with get_round_callback() as rounds, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is in beta
        message = chat.stream_events("Hi", version="v3").output
    assert "".join(each["text"] for each in rounds.rounds).strip() == message.text


def test_a_handler_that_prints_tokens_prints_one_reply(obliging):
    class Printing(BaseCallbackHandler):
        printed = ""

        def on_llm_new_token(self, token, **kwargs):
            self.printed += token

    chat = ChatAdaFuse(engine=obliging, temperature=1)
    for n in (1, 2):
        handler = Printing()
        said = chat.invoke("Hi", {"callbacks": [handler]}, n=n).text
        assert handler.printed == said
