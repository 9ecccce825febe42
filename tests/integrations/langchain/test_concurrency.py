"""Event loops go on, decodes stop when nobody waits, threads get what one alone gets."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from langchain_adafuse import AdaFuseLLM, ChatAdaFuse
from tests.support.instruction_follower import answer
from tests.support.scripted import save_scripted

BOTH = pytest.mark.parametrize("kind", [AdaFuseLLM, ChatAdaFuse])


def text(reply):
    return reply if isinstance(reply, str) else reply.content


class Slow(FakeBackend):
    """A member that writes words for ever, each pass taking some time."""

    def __init__(self, name, seconds=0.005):
        super().__init__(name, lambda text: {" on": 0.9, " off": 0.1}, [" on", " off"])
        self.seconds = seconds

    def evaluate(self, asks):
        time.sleep(self.seconds)
        return super().evaluate(asks)


@pytest.fixture
def slow():
    members = [Slow("one"), Slow("two")]
    with AdaFuseEngine(members) as engine:
        yield engine, members


def stands_still(members):
    """Whether no member evaluates any more, some rounds after."""
    for _ in range(20):
        before = [member.passes for member in members]
        time.sleep(0.05)
        if before == [member.passes for member in members]:
            return True
    return False


@BOTH
async def test_the_loop_goes_on_while_members_load_and_decode(kind, tmp_path):
    members = [save_scripted(tmp_path / name, answer) for name in ("ink", "quill")]
    model = kind(members=members)

    async def beat(gaps):
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - before)

    async def longest_gap():
        gaps: list[float] = []
        heart = asyncio.create_task(beat(gaps))
        await asyncio.sleep(0)
        await model.ainvoke("Hi")
        assert [chunk async for chunk in model.astream("Hi")]
        await model.abatch(["Hi"] * 4)
        heart.cancel()
        model.unload()
        assert len(gaps) > 5
        return max(gaps)

    tries: list[float] = []
    while len(tries) < 10 and (not tries or min(tries) >= 0.1):  # a busy machine may hold up some
        tries.append(await longest_gap())
    assert min(tries) < 0.1, tries


@BOTH
async def test_leaving_or_cancelling_asynchronous_calls_stops_the_decode(kind, slow):
    engine, members = slow
    model = kind(engine=engine, max_new_tokens=10_000)
    async with aclosing(model.astream("Hi")) as chunks:
        async for _ in chunks:
            break
    await asyncio.sleep(0.05)
    assert stands_still(members)
    for call in (model.ainvoke("Hi"), model.abatch(["Hi", "Hey"])):
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stands_still(members)


@BOTH
async def test_batches_share_passes(kind):
    asked = []

    class Counted(FakeBackend):
        def evaluate(self, asks):
            asked.append(len(asks))
            time.sleep(0.002)
            return super().evaluate(asks)

    rule = lambda text: {" on": 0.9, " off": 0.1}  # noqa: E731
    with AdaFuseEngine([Counted("one", rule), Counted("two", rule)]) as engine:
        model = kind(engine=engine, max_new_tokens=8)
        model.batch(["Hi"] * 4)
        assert max(asked) > 1
        asked.clear()
        await model.abatch(["Hi"] * 4)
        assert max(asked) == 4
