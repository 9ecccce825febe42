"""Streams, chains and batches give the engine's text, block no event loop, and can be left."""

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from adafuse_llm import AdaFuseEngine
from adafuse_llm.adapters.ensembles import Ensemble
from adafuse_llm.backends import FakeBackend
from adafuse_llm.embedded import member_paths
from langchain_adafuse import AdaFuseLLM, ChatAdaFuse
from tests.support.scripted import scripted_engine

REPLY = "The lamp was lit,  and so  it was.\n\n- bread\n- soup \U0001f600"

text = StrOutputParser().invoke


@pytest.mark.parametrize("stop", [[], [" so"]])
async def test_all_ways_give_the_text_of_the_engine(kind, stop):
    engine = scripted_engine(lambda _: REPLY)
    model = kind(engine=engine, stop=stop)
    prompt: Any = "Say it.\nAnswer:"
    messages = [{"role": "user", "content": prompt}]
    given: Any = {"prompt": prompt} if kind is AdaFuseLLM else {"messages": messages}
    pieces = [event.text for event in engine.stream(stop=stop, **given) if event.text]
    whole = "".join(pieces)

    assert text(model.invoke(prompt)) == text(await model.ainvoke(prompt)) == whole
    assert [text(reply) for reply in model.batch([prompt] * 2)] == [whole] * 2
    assert [text(chunk) for chunk in model.stream(prompt) if text(chunk)] == pieces
    streamed = [text(chunk) async for chunk in model.astream(prompt)]
    assert [each for each in streamed if each] == pieces
    chain = PromptTemplate.from_template("{input}") | model | StrOutputParser()
    assert "".join(chain.stream({"input": prompt})) == whole


async def test_the_loop_goes_on_while_members_load_and_decode(monkeypatch):
    engine = Ensemble.engine
    monkeypatch.setattr(Ensemble, "engine", lambda self: time.sleep(0.5) or engine(self))
    chat = ChatAdaFuse(members=[str(path) for path in member_paths()[:2]])
    for call in (lambda: chat.ainvoke("Hi"), lambda: anext(chat.astream("Hi"))):
        task, beats = asyncio.ensure_future(call()), 0
        while not task.done():
            await asyncio.sleep(0.005)
            beats += 1
        assert beats > 10  # a loop that waits for the members has one or two
        assert await task
    chat.unload()


class Slow(FakeBackend):
    """A member that writes words for ever, each pass taking some time."""

    asked = 0

    def __init__(self, name):
        super().__init__(name, lambda text: {" on": 0.9, " off": 0.1}, [" on", " off"])

    def evaluate(self, asks):
        self.asked = max(self.asked, len(asks))
        time.sleep(0.005)
        return super().evaluate(asks)


async def test_batches_share_passes_and_leaving_or_cancelling_stops_the_decode(kind):
    members = [Slow("one"), Slow("two")]

    def stands_still():
        for _ in range(20):
            before = [member.passes for member in members]
            time.sleep(0.05)
            if before == [member.passes for member in members]:
                return True
        return False

    with AdaFuseEngine(members) as engine:
        await kind(engine=engine, max_new_tokens=4).abatch(["Hi"] * 4)
        assert members[0].asked == 4
        model = kind(engine=engine, max_new_tokens=10_000)
        async with aclosing(model.astream("Hi")) as chunks:
            async for _ in chunks:
                break
        await asyncio.sleep(0.05)
        assert stands_still()
        for call in (model.ainvoke("Hi"), model.abatch(["Hi", "Hey"])):
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert stands_still()
        for _ in model.stream("Hi"):
            break
        assert stands_still()
