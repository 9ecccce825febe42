"""Seeds, several responses, log-probabilities, and the metadata of responses."""

from __future__ import annotations

import json
import math
import warnings
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidOptionError
from adafuse_llm.backends import FakeBackend
from langchain_adafuse import AdaFuseLLM, ChatAdaFuse, get_round_callback
from tests.support.thinkers import thinkers

BOTH = pytest.mark.parametrize("kind", [AdaFuseLLM, ChatAdaFuse])
WORDS = {" on": 0.4, " off": 0.3, " up": 0.2, " down": 0.1}
DURATIONS = ("load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def engine():
    """Two members that write any of four words after each other."""
    members = [FakeBackend(name, lambda text: WORDS, list(WORDS)) for name in ("ink", "quill")]
    with AdaFuseEngine(members, AdaFuseConfig(max_new_tokens=12)) as engine:
        yield engine


def text(reply):
    return reply if isinstance(reply, str) else reply.content


def texts(result):
    return [[each.text for each in row] for row in result.generations]


def info(generation):
    """The metadata of a generation of either model."""
    message = getattr(generation, "message", None)
    return generation.generation_info if message is None else message.response_metadata


def many(kind, prompts):
    return [[HumanMessage(prompt)] for prompt in prompts] if kind is ChatAdaFuse else prompts


@BOTH
async def test_a_seed_gives_the_same_response_everywhere(kind, engine):
    model = kind(engine=engine, temperature=1)
    drawn = [text(model.invoke("Go", seed=seed)) for seed in range(8)]
    assert len(set(drawn)) > 4
    seeded = kind(engine=engine, temperature=1, seed=3)
    assert text(seeded.invoke("Go")) == text(await seeded.ainvoke("Go")) == drawn[3]
    assert "".join(map(text, seeded.stream("Go"))) == drawn[3]
    assert "".join([text(chunk) async for chunk in seeded.astream("Go")]) == drawn[3]
    assert [text(each) for each in seeded.batch(["Go", "Go"])] == [drawn[3]] * 2
    assert text(seeded.invoke("Go", temperature=0)) == text(kind(engine=engine).invoke("Go"))
    assert text(seeded.invoke("Go", top_k=1)).split() == ["on"] * 12


@BOTH
async def test_n_responses_have_their_own_seeds_and_usage(kind, engine):
    model = kind(engine=engine, temperature=1, seed=5, n=3)
    prompts = many(kind, ["Go", "Come"])
    result = model.generate(prompts)
    assert [len(row) for row in result.generations] == [3, 3]
    seeds = list(AdaFuseConfig(temperature=1, seed=5, n=3).seeds())
    for prompt, row in zip(("Go", "Come"), result.generations, strict=True):
        assert [info(each)["seed"] for each in row] == seeds
        alone = [text(model.invoke(prompt, n=1, seed=seed)) for seed in seeds]
        assert [each.text for each in row] == alone
        assert len(set(alone)) > 1
    assert texts(await model.agenerate(prompts)) == texts(result)
    usages = [[info(each)["token_usage"] for each in row] for row in result.generations]
    written = sum(usage["completion_tokens"] for row in usages for usage in row)
    read = sum(row[0]["prompt_tokens"] for row in usages)
    assert result.llm_output is not None
    assert result.llm_output["token_usage"] == {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }
    assert text(model.invoke("Go")) == result.generations[0][0].text


@pytest.mark.quick
@BOTH
def test_rounds_of_n_responses_tell_the_response(kind, engine):
    model = kind(engine=engine, temperature=1, n=2, round_detail="full")
    with get_round_callback() as rounds:
        row = model.generate(many(kind, ["Go"])).generations[0]
    for number, each in enumerate(row):
        mine = [done["text"] for done in rounds.rounds if done["response"] == number]
        assert "".join(mine) == each.text
        kept = each.message.additional_kwargs if kind is ChatAdaFuse else each.generation_info
        assert [done["text"] for done in kept["adafuse_rounds"]] == mine


@pytest.mark.quick
@BOTH
async def test_n_responses_are_cached_and_cannot_be_streamed(kind, engine):
    model = kind(engine=engine, temperature=1, n=2, cache=InMemoryCache())
    prompts = many(kind, ["Go"])
    first = model.generate(prompts)
    assert texts(model.generate(prompts)) == texts(first)
    assert texts(model.generate(prompts, n=3)) != texts(first)
    with pytest.raises(InvalidOptionError, match="n must be 1 when streaming"):
        list(model.stream("Go"))
    with pytest.raises(InvalidOptionError, match="n must be 1 when streaming"):
        _ = [chunk async for chunk in model.astream("Go")]
    with pytest.raises(InvalidOptionError, match="n must be 1 when streaming"):
        kind(engine=engine, temperature=1, n=2, streaming=True)


@pytest.mark.quick
@BOTH
async def test_events_of_a_chain_do_not_lose_responses(kind, engine):
    """Events of a chain make LangChain stream the models that its functions invoke."""
    model = kind(engine=engine, temperature=1, n=2, seed=1)
    chain = RunnableLambda(model.invoke) | StrOutputParser()
    events = [event async for event in chain.astream_events("Go", version="v2")]
    (end,) = [event for event in events if event["event"] in ("on_llm_end", "on_chat_model_end")]
    assert text(model.invoke("Go")) in str(end["data"]["output"])
    assert events[-1]["data"]["output"] == text(model.invoke("Go"))


@pytest.mark.quick
def test_logprobs_have_openais_form_and_the_leading_members_tokens(engine):
    chat = ChatAdaFuse(engine=engine, temperature=1, seed=2, logprobs=True, top_logprobs=2)
    message = chat.invoke("Go")
    content = message.response_metadata["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == f" {message.content}"
    for each in content:
        assert each["logprob"] == pytest.approx(math.log(WORDS[each["token"]]))
        assert bytes(each["bytes"]).decode() == each["token"]
        assert [top["token"] for top in each["top_logprobs"]] == [" on", " off"]
    *chunks, last = chat.stream("Go")
    for chunk in (*chunks, last):
        tokens = chunk.response_metadata["logprobs"]["content"]
        assert "".join(each["token"] for each in tokens).strip() == chunk.text.strip()
    merged: Any = reduce(add, chunks) + last
    assert merged.response_metadata["logprobs"]["content"] == content
    assert "logprobs" not in chat.invoke("Go", logprobs=False, top_logprobs=0).response_metadata
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is in beta
        stream = chat.stream_events("Go", version="v3")
        assert stream.output.response_metadata["logprobs"]["content"] == content


def plain(metadata):
    """Metadata without what differs between two calls."""
    kept = {key: value for key, value in metadata.items() if not key.endswith("_duration")}
    kept["adafuse_summary"] = {**kept["adafuse_summary"], "seconds": 0}
    return kept


@pytest.mark.quick
async def test_a_stream_tells_at_its_end_what_a_call_tells(engine):
    chat = ChatAdaFuse(engine=engine, temperature=1, seed=4, logprobs=True)
    called = (chat.invoke("Go"), await chat.ainvoke("Go"))
    chunks = list(chat.stream("Go"))
    merged: Any = reduce(add, chunks)
    for message in called:
        assert plain(merged.response_metadata) == plain(message.response_metadata)
        assert merged.content == message.content
        assert merged.usage_metadata == message.usage_metadata
    metadata = called[0].response_metadata
    assert metadata["model_provider"] == "adafuse"
    usage = called[0].usage_metadata
    assert usage is not None
    assert metadata["token_usage"] == {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
    }
    for told in (metadata, merged.response_metadata):
        parts = [told[each] for each in DURATIONS]
        assert all(isinstance(part, int) and part >= 0 for part in parts)
        assert told["prompt_eval_duration"] > 0
        assert told["total_duration"] == sum(parts)
        assert json.loads(json.dumps(told, allow_nan=False)) == told
    for key in ("model_provider", "token_usage", "total_duration", "seed"):
        assert [key in chunk.response_metadata for chunk in chunks].count(True) == 1
        assert key in chunks[-1].response_metadata


@pytest.mark.quick
def test_traces_tell_the_options_of_a_call(chat):
    said = {"temperature": 0.7, "num_predict": 9, "stop_sequences": "x"}
    found = chat._get_ls_params(model="quill", **said)
    assert (found["ls_provider"], found["ls_model_name"]) == ("adafuse", "quill")
    assert (found["ls_temperature"], found["ls_max_tokens"]) == (0.7, 9)
    own = ChatAdaFuse(engine=chat.engine, temperature=0.2, max_tokens=5, stop="y", use=["ink"])
    found = own._get_ls_params()
    assert (found["ls_model_name"], found["ls_max_tokens"], found["ls_stop"]) == ("ink", 5, ["y"])
    assert own._get_ls_params(stop=["x"])["ls_stop"] == ["x"]


@pytest.mark.quick
def test_variables_reach_the_chat_templates():
    with thinkers("qwen") as engine:
        chat = ChatAdaFuse(engine=engine)
        thinks = chat.invoke("Where?").usage_metadata
        off = {"enable_thinking": False}
        silent = chat.invoke("Where?", chat_template_kwargs=off).usage_metadata
        own = ChatAdaFuse(engine=engine, chat_template_kwargs=off).invoke("Where?").usage_metadata
        assert thinks is not None
        assert silent is not None
        assert own is not None
        assert thinks["input_tokens"] < silent["input_tokens"] == own["input_tokens"]
        with pytest.raises(InvalidOptionError, match="Did you mean 'enable_thinking'"):
            chat.invoke("Where?", chat_template_kwargs={"enable_thinkin": False})
