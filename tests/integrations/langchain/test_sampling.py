"""Seeds, several responses, log-probabilities, and the metadata of responses."""

import json
import math
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidOptionError
from adafuse_llm.backends import FakeBackend
from langchain_adafuse import ChatAdaFuse, get_round_callback

WORDS = {" on": 0.4, " off": 0.3, " up": 0.2, " down": 0.1}


@pytest.fixture(scope="module")
def engine():
    members = [FakeBackend(name, lambda text: WORDS, list(WORDS)) for name in ("ink", "quill")]
    with AdaFuseEngine(members, AdaFuseConfig(max_new_tokens=12)) as engine:
        yield engine


text = StrOutputParser().invoke


async def test_n_responses_have_their_own_seeds_rounds_and_usage(kind, engine):
    model = kind(engine=engine, temperature=1, seed=5, n=3)
    prompts: Any = ["Go", "Come"]
    if kind is ChatAdaFuse:
        prompts = [[HumanMessage(prompt)] for prompt in prompts]
    with get_round_callback() as rounds:
        (row,) = model.generate(prompts[:1]).generations
    for number, seed in enumerate(AdaFuseConfig(seed=5, n=3).seeds()):
        message = getattr(row[number], "message", None)
        info = message.response_metadata if message else row[number].generation_info
        assert info["seed"] == seed
        assert info["token_usage"]["completion_tokens"] == 12
        mine = [done["text"] for done in rounds.rounds if done["response"] == number]
        assert "".join(mine) == row[number].text == text(model.invoke("Go", n=1, seed=seed))
    again, others = (await model.agenerate(prompts)).generations
    assert [each.text for each in again] == [each.text for each in row]
    assert len(others) == 3
    assert text(model.invoke("Go")) == row[0].text
    with pytest.raises(InvalidOptionError, match="'n'"):
        next(model.stream("Go"))
    with pytest.raises(InvalidOptionError, match="'n'"):
        await anext(model.astream("Go"))


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
    assert "logprobs" not in chat.invoke("Go", logprobs=False, top_logprobs=0).response_metadata


@pytest.mark.quick
async def test_the_end_of_a_stream_has_the_metadata_of_a_call(engine):
    chat = ChatAdaFuse(engine=engine, temperature=1, seed=4, logprobs=True)
    called = await chat.ainvoke("Go")
    *chunks, last = chat.stream("Go")
    assert not any(chunk.response_metadata or chunk.usage_metadata for chunk in chunks)
    merged: Any = reduce(add, [*chunks, last])
    assert (merged.content, merged.usage_metadata) == (called.content, called.usage_metadata)
    metadata, other = last.response_metadata, called.response_metadata
    assert {key for key in metadata if metadata[key] != other[key]} <= {"adafuse_summary"}
    assert metadata.keys() == other.keys()
    assert (metadata["model_provider"], metadata["finish_reason"]) == ("adafuse", "length")
    assert set(metadata["usage_by_member"]) == {"ink", "quill"}
    assert list(metadata["token_usage"].values()) == [*(called.usage_metadata or {}).values()][:3]
    assert json.loads(json.dumps(metadata, allow_nan=False)) == metadata
