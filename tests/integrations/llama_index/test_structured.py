"""Objects of a class out of replies: asked for in clean words, read, checked, asked for again."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel, Field, field_validator
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import (
    AdaFuseEngine,
    GrammarError,
    MalformedReplyError,
)
from tests.support.llama_calls import recorded
from tests.support.scripted import scripted, scripted_engine


class Ship(BaseModel):
    """A ship."""

    name: str = Field(description="What it is called.")
    kind: Literal["ferry", "tug"]
    length: float = Field(gt=0)
    crew: tuple[str, ...] = ()


FERRY: dict[str, Any] = {
    "name": "Orrin {II}",
    "kind": "ferry",
    "length": 31.5,
    "crew": ["Anna", "船長"],
}
WRITTEN = json.dumps(FERRY, ensure_ascii=False)
PROMPT = PromptTemplate("Describe the ship {name}.")

REPLIES = {
    "bare": WRITTEN,
    "fenced": f"```json\n{json.dumps(FERRY, indent=1, ensure_ascii=False)}\n```",
    "wrapped": f"Here it is:\n\n{WRITTEN}\n\nHas it all you need?",
    "reasoned": f'<think>A {{"name": "tug"}}? No.</think>{WRITTEN}',
}


def ships(prompt: str) -> str:
    return next((reply for key, reply in REPLIES.items() if f"ship {key}." in prompt), "{}")


@pytest.fixture(scope="module")
def llm():
    """Members whose replies are requested in the prompt only."""
    with scripted_engine(ships) as engine:
        yield AdaFuseLLM(engine=engine, enforce=False)


async def predict(llm, path, name, kind=Ship, **options):
    """By the four ways of structured prediction."""
    given = getattr(llm, path)(kind, PROMPT, name=name, llm_kwargs=options)
    if path == "stream_structured_predict":
        return list(given)[-1]
    if path == "astream_structured_predict":
        return [each async for each in await given][-1]
    return await given if path.startswith("a") else given


WAYS = (
    "structured_predict",
    "astructured_predict",
    "stream_structured_predict",
    "astream_structured_predict",
)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("way", WAYS)
async def test_an_object_is_read_whatever_stands_around_it(llm, way, name):
    assert await predict(llm, way, name) == Ship(**FERRY)


@pytest.mark.parametrize("way", WAYS)
async def test_a_wrong_reply_is_an_error(way):
    with scripted_engine(lambda _: WRITTEN.replace("ferry", "kayak")) as engine:
        llm = AdaFuseLLM(engine=engine, enforce=False)
        with recorded() as record, pytest.raises(MalformedReplyError, match="kind: Input should"):
            await predict(llm, way, "wrong")
        assert len(record.named("LLMChatEndEvent")) == 1
        with pytest.raises(MalformedReplyError, match="max_tokens"):
            await predict(llm, way, "cut", max_new_tokens=9)


@pytest.mark.quick
def test_members_read_the_schema_as_it_is(llm):
    seen: list[str] = []
    with AdaFuseEngine([scripted(lambda prompt: seen.append(prompt) or WRITTEN)]) as engine:
        AdaFuseLLM(engine=engine).structured_predict(Ship, PROMPT, name="it")
    (prompt,) = {text for text in seen if "JSON schema" in text}
    assert json.dumps(Ship.model_json_schema(), separators=(",", ":")) in prompt
    assert "{{" not in prompt
    assert prompt.count("Describe the ship it.") == 1
    assert PROMPT.output_parser is None


@pytest.mark.parametrize("way", WAYS[2:])
async def test_a_stream_shows_objects_that_grow(llm, way):
    given = getattr(llm, way)(Ship, PROMPT, name="wrapped", llm_kwargs={"max_words": 1})
    shown = list(given) if way[0] == "s" else [each async for each in await given]
    names = [getattr(each, "name", None) for each in shown]
    assert names[-1] == FERRY["name"]
    assert any(not isinstance(each, Ship) for each in shown[:-1])
    assert isinstance(shown[-1], Ship)
    assert len(shown) >= 4
    assert all(FERRY["name"].startswith(name) for name in names if name)


@pytest.mark.quick
async def test_as_structured_llm(llm):
    ship = llm.as_structured_llm(Ship)
    asked = [ChatMessage("Describe the ship fenced.")]
    assert ship.chat(asked).raw == Ship(**FERRY)
    assert (await ship.achat(asked)).raw == Ship(**FERRY)
    assert ship.complete("Describe the ship bare.").raw == Ship(**FERRY)
    assert (await ship.acomplete("Describe the ship bare.")).raw == Ship(**FERRY)
    assert list(ship.stream_chat(asked))[-1].raw == Ship(**FERRY)
    assert [each async for each in await ship.astream_chat(asked)][-1].raw == Ship(**FERRY)


# Enforced ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stubborn():
    """Members that never write JSON where they may write something else."""
    with scripted_engine(lambda prompt: "I would rather not.") as engine:
        yield AdaFuseLLM(
            engine=engine, max_words=1, branching_factor=1, max_word_tokens=4,
            max_new_tokens=90,
        )  # fmt: skip


class Berth(BaseModel):
    """A place for a ship."""

    number: int
    side: Literal["port", "starboard"]


@pytest.mark.parametrize("way", WAYS)
async def test_members_can_write_nothing_but_the_object(stubborn, way):
    given = getattr(stubborn, way)(Berth, PROMPT, name="any")
    if "stream" in way:
        shown = list(given) if way[0] == "s" else [each async for each in await given]
        berth = shown[-1]
    else:
        berth = await given if way.startswith("a") else given
    assert isinstance(berth, Berth)


class Names(BaseModel):
    names: list[str]


@pytest.mark.parametrize("way", WAYS)
async def test_an_object_that_the_limit_cuts_is_an_error(way):
    endless = '{"names": ["Anna", "Bo", "Carl'.ljust(99, "l")
    with scripted_engine(lambda prompt: endless) as engine:
        llm = AdaFuseLLM(engine=engine, max_new_tokens=40)
        with recorded() as record, pytest.raises(MalformedReplyError, match="max_tokens"):
            await predict(llm, way, "long", Names)
    (end,) = record.named("AdaFuseGenerationEndEvent")  # no other reply is requested
    assert (end.finish_reason, json.loads(end.text)["names"][:2]) == ("length", ["Anna", "Bo"])


class Even(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def _check(cls, number: int) -> int:
        if number % 2:
            raise ValueError("it is odd")
        return number


@pytest.mark.parametrize("way", WAYS)
async def test_what_a_validator_refuses_is_an_error(way):
    with (
        scripted_engine(lambda _: '{"number": 3}') as engine,
        pytest.raises(MalformedReplyError, match="it is odd"),
    ):
        await predict(AdaFuseLLM(engine=engine), way, "any", Even)


class Crew(BaseModel):
    names: set[str]


async def test_a_schema_that_is_refused_falls_back_to_the_prompt(caplog):
    with scripted_engine(lambda prompt: '{"names": ["Anna"]}') as engine:
        llm = AdaFuseLLM(engine=engine)
        for _ in range(2):
            assert llm.structured_predict(Crew, PROMPT, name="any") == Crew(names={"Anna"})
        (warning,) = [each for each in caplog.records if "not enforced" in each.message]
        assert "uniqueItems" in warning.message
        strict = AdaFuseLLM(engine=engine, enforce=True)
        for way in WAYS:
            with pytest.raises(GrammarError, match="uniqueItems"):
                given = getattr(strict, way)(Crew, PROMPT, name="any")
                if way == "stream_structured_predict":
                    list(given)
                elif way == "astream_structured_predict":
                    _ = [each async for each in await given]
                elif way == "astructured_predict":
                    await given
