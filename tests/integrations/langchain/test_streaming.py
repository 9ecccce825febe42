"""Streams say what a whole call says, span by span."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from langchain_adafuse import AdaFuseLLM, ChatAdaFuse
from tests.support.scripted import scripted_engine

REPLIES = {
    "words": "The lamp was lit,  and so  it was.\n\n- bread\n- salt",
    "chinese": "中文没有空格。没有空格中文。",
    "emoji": "Soup \U0001f600\U0001f600 and é tea \U0001f468‍\U0001f469‍\U0001f467.",
}


@pytest.fixture(scope="module")
def engine():
    """An engine that replies with the text whose name is in the prompt."""

    def script(prompt):
        return next((reply for name, reply in REPLIES.items() if name in prompt), "")

    with scripted_engine(script) as engine:
        yield engine


def text(reply):
    return reply if isinstance(reply, str) else reply.content


@pytest.mark.parametrize(
    ("kind", "reply", "stop"),
    [
        (AdaFuseLLM, "words", []),
        (AdaFuseLLM, "chinese", ["空格"]),
        (ChatAdaFuse, "emoji", []),
        (ChatAdaFuse, "words", [" lit"]),
    ],
)
async def test_all_ways_give_the_text_of_the_engine(engine, kind, reply, stop):
    model = kind(engine=engine, stop=stop)
    prompt = f"Say {reply}." if kind is ChatAdaFuse else f"Say {reply}.\nAnswer:"
    given: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
    if kind is AdaFuseLLM:
        given = {"prompt": prompt}
    events = list(engine.stream(stop=stop, **given))
    whole = "".join(event.text for event in events)
    assert whole

    assert text(model.invoke(prompt)) == whole
    assert text(await model.ainvoke(prompt)) == whole
    assert [text(reply) for reply in model.batch([prompt] * 3)] == [whole] * 3
    assert [text(reply) for reply in await model.abatch([prompt] * 3)] == [whole] * 3
    assert [text(chunk) for chunk in model.stream(prompt)] == [event.text for event in events]
    chunks = [text(chunk) async for chunk in model.astream(prompt)]
    assert chunks == [event.text for event in events]
    assert "".join(text(chunk) for chunk in model.transform(iter([prompt]))) == whole

    chain = PromptTemplate.from_template("{input}") | model | StrOutputParser()
    assert chain.invoke({"input": prompt}) == whole
    pieces = list(chain.stream({"input": prompt}))
    assert "".join(pieces) == whole
    assert "".join([piece async for piece in chain.astream({"input": prompt})]) == whole

    name = "on_chat_model_stream" if kind is ChatAdaFuse else "on_llm_stream"
    streamed = [
        event["data"]["chunk"]
        async for event in chain.astream_events({"input": prompt}, version="v2")
        if event["event"] == name
    ]
    assert "".join(getattr(chunk, "content", None) or chunk.text for chunk in streamed) == whole
