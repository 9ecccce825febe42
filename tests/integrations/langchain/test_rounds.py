"""Every round reaches the callbacks, on the run of the model that played it."""

import json
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.graph import MessagesState, StateGraph

from langchain_adafuse import ChatAdaFuse, RoundCallbackHandler, get_round_callback

pytestmark = pytest.mark.quick


class Printing(BaseCallbackHandler):
    printed = ""

    def on_llm_new_token(self, token, **kwargs):
        self.printed += token


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "astream_events"])
async def test_rounds_arrive_with_the_tokens_of_the_models_own_run(model, way):
    chain: Any = RunnableLambda(lambda _: "Hi") | model | RunnableLambda(lambda reply: reply)
    printing, rounds, runs = Printing(), RoundCallbackHandler(), RunCollectorCallbackHandler()
    given = getattr(chain, way)(None, {"callbacks": [printing, rounds, runs]})
    if way == "ainvoke":
        await given
    elif way == "astream_events":
        assert [event async for event in given]
    _, run, _ = runs.traced_runs[0].child_runs
    assert {each["run_id"] for each in rounds.rounds} == {str(run.id)}
    assert [each["round"] for each in rounds.rounds] == list(range(len(rounds.rounds)))
    said = "".join(each["text"] for each in rounds.rounds)
    assert said.strip() == printing.printed.strip() == "Good day to you, and welcome."


def test_a_handler_that_prints_tokens_prints_one_response(obliging):
    chat, printing = ChatAdaFuse(engine=obliging, temperature=1, n=2), Printing()
    said = chat.invoke("Hi", {"callbacks": [printing]}).text
    assert printing.printed == said


def test_records_on_chunks_merge_to_those_of_the_message(chat):
    with get_round_callback() as rounds:
        *chunks, last = chat.stream("Hi", round_detail="full")
    assert all(len(chunk.additional_kwargs["adafuse_rounds"]) == 1 for chunk in chunks)
    assert last.response_metadata["adafuse_summary"]["rounds"] == len(chunks)
    merged = reduce(add, [*chunks, last]).additional_kwargs["adafuse_rounds"]
    assert merged == [{k: v for k, v in r.items() if k != "run_id"} for r in rounds.rounds]
    assert json.loads(json.dumps(merged, allow_nan=False)) == merged
    assert {"candidates", "margins", "winner", "score"} <= set(merged[0])
    whole = chat.invoke("Hi", round_detail="full").additional_kwargs["adafuse_rounds"]
    assert [each["text"] for each in whole] == [each["text"] for each in merged]


def test_records_of_text_models_have_the_number_of_their_prompt(llm):
    with get_round_callback() as rounds:
        result = llm.generate(["Hi", "Hey"], round_detail="full")
    for number, (generation,) in enumerate(result.generations):
        kept = generation.generation_info["adafuse_rounds"]
        assert "".join(each["text"] for each in kept) == generation.text
        heard = [each for each in rounds.rounds if each["prompt"] == number]
        assert [each["text"] for each in heard] == [each["text"] for each in kept]


@pytest.mark.parametrize("detail", ["none", "summary", "full"])
def test_round_detail_says_where_rounds_go(llm, obliging, detail):
    with get_round_callback() as rounds:
        llm.invoke("Hi", round_detail=detail)
    assert bool(rounds.rounds) == (detail != "none")
    message = ChatAdaFuse(engine=obliging, round_detail=detail).invoke("Hi")
    assert ("adafuse_rounds" in message.additional_kwargs) == (detail == "full")
    assert ("adafuse_summary" in message.response_metadata) == (detail != "none")


@pytest.mark.parametrize("options", [{"disable_streaming": True}, {"temperature": 1, "n": 2}])
def test_a_graph_streams_only_what_the_user_lets_it_stream(obliging, options):
    chat = ChatAdaFuse(engine=obliging, **options)
    graph = StateGraph(MessagesState)
    graph.add_node("say", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.set_entry_point("say")
    app: Any = graph.compile()
    with get_round_callback() as rounds:
        ((streamed, _),) = app.stream({"messages": [("user", "Hi")]}, stream_mode="messages")
    assert type(streamed) is AIMessage
    first = [each["text"] for each in rounds.rounds if not each.get("response")]
    assert "".join(first).strip() == streamed.text.strip()  # a draw can end with a newline
