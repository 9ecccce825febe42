"""A call that takes too long ends with an error."""

from __future__ import annotations

import pytest

from adafuse_llm import AdaFuseEngine, RequestTimeoutError
from adafuse_llm.backends import FakeBackend
from langchain_adafuse import AdaFuseLLM, ChatAdaFuse

pytestmark = pytest.mark.disable_socket


class Timer:
    """A timer of a call, whose time is over when a text has 60 words."""

    latest: Timer

    def __init__(self, seconds, function):
        self.cancel = lambda: None
        self._function = function

    def start(self):
        Timer.latest = self

    @classmethod
    def word(cls, prompt):
        """Words that never end."""
        if prompt.count(" o") > 60:
            cls.latest._function()
        return {" on": 0.9, " off": 0.1}


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr("langchain_adafuse._calls.threading.Timer", Timer)
    with AdaFuseEngine([FakeBackend("slow", Timer.word, [" on", " off"])]) as engine:
        yield engine


def text(reply):
    return reply if isinstance(reply, str) else reply.content


@pytest.mark.parametrize("kind", [AdaFuseLLM, ChatAdaFuse])
async def test_a_call_that_takes_too_long_is_an_error(kind, slow):
    model = kind(engine=slow, timeout=0.15, max_new_tokens=100_000)
    streamed: list[str] = []

    async def astream():
        async for chunk in model.astream("Go"):
            streamed.append(text(chunk))  # noqa: PERF401 - a comprehension would lose all

    async def stream():
        for chunk in model.stream("Go"):
            streamed.append(text(chunk))  # noqa: PERF401

    async def call(function):
        function("Go")

    for way in (
        lambda: call(model.invoke),
        lambda: model.ainvoke("Go"),
        lambda: call(lambda prompt: model.batch([prompt])),
        lambda: model.abatch(["Go"]),
        stream,
        astream,
    ):
        streamed.clear()
        with pytest.raises(RequestTimeoutError, match=r"timeout=0\.15 seconds"):
            await way()
        assert bool(streamed) == (way in (stream, astream))
        assert set("".join(streamed).split()) <= {"on", "off"}
