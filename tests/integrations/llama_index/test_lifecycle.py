"""LLMs that are created, copied, pickled, described, loaded, and stopped."""

import asyncio
import copy
import pickle
import threading
import time
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.rate_limiter import TokenBucketRateLimiter
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, TransformersMember, errors
from adafuse_llm.adapters.ensembles import Ensemble
from adafuse_llm.backends import FakeBackend
from adafuse_llm.embedded import member_paths
from tests.support.llama_calls import FORMS, ask, counting_engine, prompt_of, recorded
from tests.support.scripted import scripted, scripted_engine

pytestmark = pytest.mark.quick


def test_making_copying_and_pickling_load_nothing(monkeypatch):
    monkeypatch.setattr("adafuse_llm.loading.members.load_members", None)
    llm = AdaFuseLLM(["no/such-model", TransformersMember(path="other/one", weight=2)], max_words=2)
    for again in (
        copy.deepcopy(llm),
        pickle.loads(pickle.dumps(llm)),
        AdaFuseLLM.from_dict(llm.to_dict()),
    ):
        assert again.to_dict() == llm.to_dict()
        assert again.to_dict()["class_name"] == "AdaFuseLLM"
        assert (again.max_words, again.to_payload()["model_name"]) == (2, "such-model+one")
    shipped = AdaFuseLLM.from_embedded(completion_to_prompt=lambda prompt: f"Q: {prompt}")
    assert shipped.model_copy(update={"strategy": "single"})._ensemble.strategy == "single"
    assert pickle.loads(pickle.dumps(shipped)).completion_to_prompt("Hi") == "Hi"
    assert AdaFuseLLM.from_dict(shipped.to_dict()).to_payload()["model_name"] == "wren+heron+finch"


async def test_members_are_loaded_in_a_thread_and_let_go(monkeypatch):
    threads = []
    load = Ensemble.engine
    monkeypatch.setattr(
        Ensemble, "engine", lambda self: threads.append(threading.current_thread()) or load(self)
    )
    llm = AdaFuseLLM([str(member_paths()[0])], max_new_tokens=3)
    for path in ("achat", "acomplete"):
        llm.unload()
        assert not llm._ensemble.is_loaded
        threads.clear()
        assert (await ask(llm, path, "The mill")).text
        assert threads[0] is not threading.main_thread()
    llm.unload()


def test_a_deep_copy_has_its_own_configuration_and_the_same_engine():
    with scripted_engine(lambda prompt: "One two three four.") as engine:
        callbacks, limiter = CallbackManager(), TokenBucketRateLimiter(requests_per_minute=6000)
        weights = {"ink": 1.0, "quill": 1.0}
        llm = AdaFuseLLM(
            engine=engine, weights=weights, callback_manager=callbacks, rate_limiter=limiter
        )
        for copied in (copy.deepcopy({"llm": llm})["llm"], llm.model_copy(deep=True)):
            assert copied.to_dict() == llm.to_dict()
            assert copied.engine is engine
            assert (copied.callback_manager, copied.rate_limiter) == (callbacks, limiter)
            copied.stop = (" two",)
            copied.weights["ink"] = 0.0
            assert (llm.stop, llm.weights) == (None, weights)
            assert copied.complete("Count!").text == "One"


def test_a_given_engine_is_no_part_of_pickles_and_stays_open():
    with counting_engine(3) as engine:
        llm = AdaFuseLLM(engine=engine)
        with pytest.raises(TypeError, match=r"cannot be pickled.*members="):
            pickle.dumps(llm)
        llm.unload()
        assert llm.complete("x").text


# Metadata ---------------------------------------------------------------------------------------


def test_metadata_is_true_and_can_be_overridden():
    members = [
        scripted(lambda p: "Yes.", name="a", window=900),
        scripted(lambda p: "Yes.", name="b", template=None, window=700),
    ]
    with AdaFuseEngine(members, AdaFuseConfig(max_new_tokens=33)) as engine:
        llm = AdaFuseLLM(engine=engine)
        told = llm.metadata
        assert (told.context_window, told.num_output, told.model_name) == (700, 33, "a+b")
        assert told.is_chat_model
        assert told.is_function_calling_model
        assert AdaFuseLLM(engine=engine, use=["a"]).metadata.context_window == 900
        plain = AdaFuseLLM(engine=engine, use=["b"]).metadata
        assert (plain.is_chat_model, plain.is_function_calling_model) == (False, False)
        with pytest.raises(errors.InvalidOptionError, match="'ash'"):
            AdaFuseLLM(engine=engine, use=["ash"]).metadata  # noqa: B018
        llm.context_window, llm.is_chat_model = 500, False
        assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (500, False)


# Ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FORMS)
async def test_a_prompt_that_is_too_long_fails_at_the_call(path):
    """Streams fail at the call, too, and the members compute nothing."""
    members = [FakeBackend(name, lambda text: {"a": 1.0}, context_window=90) for name in "ab"]
    with AdaFuseEngine(members) as engine:
        asked: Any = [ChatMessage("long " * 40)] if "chat" in path else "long " * 40
        with pytest.raises(errors.ContextWindowError):
            given = getattr(AdaFuseLLM(engine=engine), path)(asked)
            if path.startswith("a"):
                await given
        assert [member.passes for member in members] == [0, 0]


def test_a_call_that_takes_too_long_ends():
    with scripted_engine(lambda _: "A long story. " * 50) as engine:
        llm = AdaFuseLLM(engine=engine, request_timeout=1e-6)
        with pytest.raises(errors.RequestTimeoutError):
            llm.complete("Go")
        assert llm.chat([ChatMessage("Go")], timeout=60, max_tokens=2).message.content


def settled(backend: Any) -> int:
    """Wait until a member computes no more, and return its number of passes."""
    while True:
        before = backend.passes
        time.sleep(0.05)
        if backend.passes == before:
            return before


@pytest.fixture
def slow():
    with counting_engine(200, seconds=0.004) as engine:
        yield AdaFuseLLM(engine=engine), engine.backends[1]


@pytest.mark.parametrize(
    ("path", "closes"),
    [
        ("astream_chat", True),
        ("stream_chat", True),
        ("stream_chat", False),
    ],
)
async def test_a_stream_that_is_left_stops_within_a_round(slow, path, closes):
    llm, member = slow
    stream = getattr(llm, path)([ChatMessage("Count!")] if "chat" in path else "Count!")
    if path.startswith("a"):
        stream = await stream
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(0.02)  # the event loop closes the generators inside
    else:
        next(stream)
        if closes:
            stream.close()
        del stream
    assert settled(member) < 40
    assert llm.complete("Count!", max_new_tokens=2).text == " one one"


@pytest.mark.parametrize("path", ["acomplete", "astream_chat"])
async def test_a_task_that_is_cancelled_stops_within_a_round(slow, path):
    llm, member = slow
    with recorded():  # keeps the exception of the stream
        task = asyncio.create_task(ask(llm, path, prompt_of(path, "Count!")))
        while not member.passes:  # noqa: ASYNC110  # another thread makes them
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert settled(member) < 60
