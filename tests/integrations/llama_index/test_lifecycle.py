"""Making, keeping, copying and ending: what an LLM costs when it is not asked anything."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import CustomLLM
from llama_index.core.rate_limiter import TokenBucketRateLimiter
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    ContextWindowError,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
    RuntimeConfig,
    TransformersMember,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.embedded import member_paths
from tests.support.llama_calls import PATHS, ask, counting_engine, prompt_of, recorded
from tests.support.models import CHATML
from tests.support.scripted import WINDOW, save_scripted, scripted, scripted_engine

# Making -----------------------------------------------------------------------------------------


@pytest.fixture
def no_loading(monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("something was loaded")

    monkeypatch.setattr("adafuse_llm.loading.members.load_members", load)


@pytest.mark.quick
def test_making_copying_and_pickling_load_nothing(no_loading):
    llm = AdaFuseLLM(["no/such-model", TransformersMember(path="other/one", weight=2)], max_words=2)
    assert isinstance(llm, CustomLLM)
    assert copy.deepcopy(llm).to_dict() == llm.to_dict()
    again = pickle.loads(pickle.dumps(llm))
    assert again.to_dict() == llm.to_dict() == AdaFuseLLM.from_dict(llm.to_dict()).to_dict()
    assert again.max_words == 2
    assert llm.to_payload()["model_name"] == "such-model+one"
    assert llm.model_copy(update={"max_words": 1}).max_words == 1
    shipped = AdaFuseLLM.from_embedded()
    assert AdaFuseLLM.from_dict(shipped.to_dict()).to_payload()["model_name"] == "wren+heron+finch"


def test_members_are_loaded_once_and_let_go():
    wren = [str(member_paths()[0])]
    llm, same = AdaFuseLLM(wren, max_new_tokens=3), AdaFuseLLM(wren, max_words=1)
    assert llm.warmup() is llm
    first = llm.engine
    assert first is same.engine is pickle.loads(pickle.dumps(llm)).engine
    other = AdaFuseLLM(wren, runtime=RuntimeConfig(max_requests=2))
    assert other.engine is not first
    other.unload()
    llm.unload()
    assert same.complete("The mill", max_new_tokens=2).text
    assert llm.engine is not first
    llm.unload()


@pytest.mark.quick
def test_wrong_ways_of_making_one():
    with counting_engine(3) as engine:
        wrongs: list[dict[str, Any]] = [{}, {"members": ["a"], "engine": engine}]
        for wrong in wrongs:
            with pytest.raises(InvalidInputError, match=r"pass either members=.* or engine="):
                AdaFuseLLM(**wrong)
        with pytest.raises(InvalidInputError, match="cannot be combined with dtype"):
            AdaFuseLLM(engine=engine, dtype="bfloat16")
        with pytest.raises(InvalidOptionError, match=r"'max_word'\. Did you mean 'max_words'\?"):
            AdaFuseLLM(engine=engine, max_word=2)  # type: ignore[call-arg]
        with pytest.raises(InvalidOptionError, match="max_words"):
            AdaFuseLLM(engine=engine, max_words=0)
        with pytest.raises(InvalidOptionError, match="option 'temperature'"):
            AdaFuseLLM(engine=engine, temperature=-0.7)
        none: Any = None
        assert AdaFuseLLM(engine=engine, temperature=0, callback_manager=none).complete("x").text
    with pytest.raises(InvalidInputError, match="members must be a list"):
        AdaFuseLLM("gpt2")
    with pytest.raises(InvalidInputError, match="members is empty"):
        AdaFuseLLM(iter([]))
    with pytest.raises(InvalidOptionError, match="members"):
        AdaFuseLLM(model="gpt2")  # type: ignore[call-arg]


@pytest.mark.quick
def test_a_deep_copy_has_its_own_configuration_and_the_same_engine():
    manager = CallbackManager([TokenCountingHandler()])
    with scripted_engine(lambda prompt: "One two three four.") as engine:
        llm = AdaFuseLLM(
            engine=engine,
            max_words=1,
            weights={"ink": 1.0, "quill": 1.0},
            system_prompt="Be brief.",
            callback_manager=manager,
            rate_limiter=TokenBucketRateLimiter(requests_per_minute=6000),
        )
        for copied in (copy.deepcopy(llm), llm.model_copy(deep=True)):
            assert copied is not llm
            assert copied.to_dict() == llm.to_dict()
            assert copied.engine is llm.engine is engine
            assert copied.callback_manager is manager
            assert copied.rate_limiter is llm.rate_limiter
            copied.max_words, copied.system_prompt, copied.stop = 3, None, (" two",)
            assert isinstance(copied.weights, dict)
            copied.weights["ink"] = 0.0
            assert (llm.max_words, llm.system_prompt, llm.stop) == (1, "Be brief.", None)
            assert llm.weights == {"ink": 1.0, "quill": 1.0}
            assert copied.complete("Count!").text == "One"
            assert llm.complete("Count!").text == "One two three four."
    shipped = AdaFuseLLM.from_embedded(max_new_tokens=3)
    assert copy.deepcopy(shipped).engine is shipped.engine


@pytest.mark.quick
@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_that_is_too_long_fails_at_the_call(path):
    """Also for streams, and without any computation."""
    members = [FakeBackend(name, lambda text: {"a": 1.0}, context_window=90) for name in "ab"]
    with AdaFuseEngine(members) as engine, recorded() as record:
        asked: Any = "long " * 40
        asked = [ChatMessage(asked)] if "chat" in path else asked
        with pytest.raises(ContextWindowError, match="context window"):
            given = getattr(AdaFuseLLM(engine=engine), path)(asked)
            if path.startswith("a"):
                await given
        assert [member.passes for member in members] == [0, 0]
    assert len(record.closed("AdaFuse.decode")) == 1


def test_a_given_engine_is_no_part_of_pickles_or_dictionaries():
    with counting_engine(3) as engine:
        llm = AdaFuseLLM(engine=engine)
        assert copy.deepcopy({"llm": llm})["llm"].engine is engine
        with pytest.raises(TypeError, match=r"cannot be pickled.*members="):
            pickle.dumps(llm)
        with pytest.raises(InvalidInputError, match="pass either"):
            AdaFuseLLM.from_dict(llm.to_dict())
        llm.unload()
        assert llm.complete("x").text  # not ours to close


@pytest.mark.quick
def test_an_assigned_option_is_checked():
    with counting_engine(3) as engine:
        llm = AdaFuseLLM(engine=engine, max_new_tokens=4)
        for name, value in [("max_new_tokens", -5), ("stop", ("",)), ("weights", {"oak": -1.0})]:
            with pytest.raises(InvalidOptionError, match=name):
                setattr(llm, name, value)
        for name, value in [("emit_events", "perhaps"), ("max_new_token", 3)]:
            with pytest.raises(ValueError, match=name):
                setattr(llm, name, value)
        llm.stop = " one"
        assert (llm.max_new_tokens, llm.stop) == (4, (" one",))


@pytest.mark.quick
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
        plain = AdaFuseLLM(engine=engine, use=["b"], max_new_tokens=9).metadata
        assert (plain.is_chat_model, plain.is_function_calling_model) == (False, False)
        assert plain.num_output == 9
        with pytest.raises(InvalidInputError, match="'ash'"):
            AdaFuseLLM(engine=engine, use=["ash"]).metadata  # noqa: B018
        llm.context_window, llm.is_chat_model = 500, False
        assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (500, False)
        assert copy.deepcopy(llm).metadata == llm.metadata


@pytest.mark.quick
def test_metadata_of_members_loads_nothing(no_loading, tmp_path):
    shipped = AdaFuseLLM.from_embedded(max_new_tokens=9)
    shipped.unload()
    metadata = shipped.metadata
    assert (metadata.context_window, metadata.num_output) == (4096, 9)
    assert metadata.is_chat_model
    assert metadata.model_name == "wren+heron+finch"
    with pytest.raises(InvalidInputError, match="there is no member 'ash'"):
        AdaFuseLLM.from_embedded(use=["ash"]).metadata  # noqa: B018
    with pytest.raises(AssertionError, match="something was loaded"):
        AdaFuseLLM([str(tmp_path)]).metadata  # noqa: B018


@pytest.mark.parametrize("template", [CHATML, None])
@pytest.mark.parametrize("kind", ["bytelevel", "sentencepiece", "unigram"])
def test_metadata_is_the_same_before_and_after_loading(tmp_path, monkeypatch, kind, template):
    path = save_scripted(tmp_path / "ink", lambda prompt: "Yes.", kind, template)
    llm = AdaFuseLLM([path])
    with monkeypatch.context() as patch:
        patch.setattr("adafuse_llm.loading.members.load_members", None)
        before = llm.metadata
    llm.warmup()
    assert llm.metadata == before
    assert before.is_chat_model == (template is not None)
    assert before.context_window == WINDOW
    llm.unload()


# Together ---------------------------------------------------------------------------------------


async def test_loading_does_not_block_the_event_loop_either(monkeypatch):
    llm = AdaFuseLLM.from_embedded(max_new_tokens=2)
    llm.unload()
    threads = []
    load = AdaFuseEngine.from_pretrained.__func__  # type: ignore[attr-defined]

    def watched(cls, *args, **kwargs):
        threads.append(threading.current_thread())
        return load(cls, *args, **kwargs)

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", classmethod(watched))
    assert (await llm.acomplete("The mill")).text
    assert threads
    assert threading.main_thread() not in threads
    llm.unload()


# Ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_failing_member_is_named_at_once_and_the_next_call_answers(path):
    failing = threading.Event()
    failing.set()

    def rule(text: str) -> dict[str, float]:
        if failing.is_set() and text.endswith(" one"):
            raise RuntimeError("the cable was cut")
        return {"<end>": 0.9, "!": 0.1} if text.endswith(" one") else {" one": 0.9, "?": 0.1}

    with AdaFuseEngine([FakeBackend("oak", rule), FakeBackend("elm", rule)]) as engine:
        llm = AdaFuseLLM(engine=engine)
        start = time.perf_counter()
        with pytest.raises(MemberError, match=r"member '(oak|elm)' failed.*the cable was cut"):
            await ask(llm, path, prompt_of(path, "Count!"))
        assert time.perf_counter() - start < 10
        failing.clear()
        assert (await ask(llm, path, prompt_of(path, "Count!"))).text.strip() == "one"


def settled(backend: Any) -> int:
    """Passes of a member, once no more are made."""
    while True:
        before = backend.passes
        time.sleep(0.05)
        if backend.passes == before:
            return before


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("path", ["stream_complete", "stream_chat"])
def test_a_stream_that_is_left_stops_within_a_round(path, closes):
    with counting_engine(200, seconds=0.004) as engine:
        llm = AdaFuseLLM(engine=engine)
        stream = getattr(llm, path)([ChatMessage("Count!")] if "chat" in path else "Count!")
        for number, _ in enumerate(stream):
            if number == 2:
                break
        if closes:
            stream.close()
        else:
            del stream
        assert settled(engine.backends[1]) < 40
        assert llm.complete("Count!", max_new_tokens=2).text == " one one"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith("a")])
async def test_a_task_that_is_cancelled_stops_within_a_round(path, keep):
    with counting_engine(200, seconds=0.004) as engine:
        llm = AdaFuseLLM(engine=engine)
        with recorded() if keep else threading.Lock():
            task = asyncio.create_task(ask(llm, path, prompt_of(path, "Count!")))
            member: Any = engine.backends[1]
            while not member.passes:  # noqa: ASYNC110  # another thread makes them
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert settled(member) < 60


@pytest.mark.parametrize("path", ["astream_complete", "astream_chat"])
async def test_an_asynchronous_stream_that_is_left_stops_within_a_round(path):
    with counting_engine(200, seconds=0.004) as engine:
        asked = [ChatMessage("Count!")] if "chat" in path else "Count!"
        stream = await getattr(AdaFuseLLM(engine=engine), path)(asked)
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.sleep(0.02)  # the event loop closes the generators inside
        assert settled(engine.backends[1]) < 40


def test_a_configuration_file_is_an_llm(tmp_path):
    path = tmp_path / "tuned.yaml"
    path.write_text("use: [wren, finch]\nmax_words: 2\nmax_new_tokens: 20\n")
    llm = AdaFuseLLM.from_config(path, max_new_tokens=8)
    assert (llm.max_words, llm.max_new_tokens) == (2, 8)
    assert llm.to_payload()["model_name"] == "wren+finch"
    path.write_text("max_words: 2\n")
    assert AdaFuseLLM.from_config(path).to_payload()["model_name"] == "wren+heron+finch"
