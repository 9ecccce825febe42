"""A call that takes too long ends with an error that has the response so far."""

from __future__ import annotations

import pickle

import pytest
from langchain_core.messages import AIMessage

from adafuse_llm import AdaFuseEngine, RequestTimeoutError
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from langchain_adafuse import AdaFuseLLM, CallTimeoutError, ChatAdaFuse

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
        """Words that never end, except after ``Stop on``."""
        if prompt.startswith("Stop on"):
            return {END: 1.0}
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
async def test_the_error_has_the_response_so_far(kind, slow):
    model = kind(engine=slow, timeout=0.15, max_new_tokens=100_000, logprobs=True)
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
        with pytest.raises(CallTimeoutError, match=r"timeout=0\.15 seconds") as caught:
            await way()
        partial = caught.value.partial
        words = text(partial)
        assert words
        assert set(words.split()) <= {"on", "off"}
        assert bool(streamed) == (way in (stream, astream))
        assert words.startswith("".join(streamed))
        assert caught.value.partials == (partial,)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.partial) == (str(caught.value), partial)
        if kind is ChatAdaFuse:
            assert isinstance(partial, AIMessage)
            assert partial.response_metadata["finish_reason"] == "cancelled"
            assert partial.usage_metadata is not None
            assert partial.usage_metadata["output_tokens"] > 0
            tokens = partial.response_metadata["logprobs"]["content"]
            assert "".join(each["token"] for each in tokens) == f" {words}"
    assert issubclass(CallTimeoutError, RequestTimeoutError)
    assert issubclass(CallTimeoutError, TimeoutError)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_batch_keeps_all_texts(slow, is_async):
    llm = AdaFuseLLM(engine=slow, timeout=0.3, max_new_tokens=100_000, temperature=1, n=2)
    with pytest.raises(CallTimeoutError) as caught:
        if is_async:
            await llm.agenerate(["Go", "Stop"], top_k=1)
        else:
            llm.generate(["Go", "Stop"], top_k=1)
    *unfinished, third, fourth = caught.value.partials
    assert third == fourth == " on"
    assert len(unfinished) == 2
    assert all(str(each).startswith(" on on on") for each in unfinished)
    chat = ChatAdaFuse(engine=slow, timeout=0.3, max_new_tokens=100_000, temperature=1, n=2)
    with pytest.raises(CallTimeoutError) as caught:
        await chat.ainvoke("Go") if is_async else chat.invoke("Go")
    assert len({text(each) for each in caught.value.partials}) == 2
