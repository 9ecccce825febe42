"""Objects of a class from replies: how they are requested, enforced, read and checked."""

import json
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel, Field, field_validator
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import AdaFuseEngine, InvalidInputError, MalformedReplyError
from tests.support.llama_calls import recorded
from tests.support.scripted import scripted, scripted_engine


class Ship(BaseModel):
    """A ship."""

    name: str = Field(description="What it is called.")
    kind: Literal["ferry", "tug"]
    length: float = Field(gt=0)
    crew: tuple[str, ...] = ()


FERRY: dict[str, Any] = {"name": "Orrin {II}", "kind": "ferry", "length": 31.5, "crew": ["船長"]}
WRITTEN = json.dumps(FERRY, ensure_ascii=False)
PROMPT = PromptTemplate("Describe the ship {name}.")

REPLIES = {
    "bare": WRITTEN,
    "fenced": f"```json\n{json.dumps(FERRY, indent=1, ensure_ascii=False)}\n```",
    "reasoned": f'<think>A {{"name": "tug"}}? No.</think>{WRITTEN}',
    "wrong": WRITTEN.replace("ferry", "kayak"),
    "odd": '{"number": 3}',
    "endless": '{"names": ["Anna", "Bo", "Carl'.ljust(99, "l"),
}

WAYS = (
    "structured_predict",
    "astructured_predict",
    "stream_structured_predict",
    "astream_structured_predict",
)


def ships(prompt: str) -> str:
    named = (reply for key, reply in REPLIES.items() if f"ship {key}." in prompt)
    return next(named, "I would rather not.")


@pytest.fixture(scope="module")
def llm():
    with scripted_engine(ships) as engine:
        yield AdaFuseLLM(engine=engine, max_new_tokens=90)


@pytest.fixture(scope="module")
def free(llm):
    """An LLM of the same members that requests objects in the prompt only."""
    return AdaFuseLLM(engine=llm.engine, enforce=False)


async def shown(llm: Any, way: str, name: str, kind: Any = Ship, **options: Any) -> list[Any]:
    given = getattr(llm, way)(kind, PROMPT, name=name, llm_kwargs=options)
    if way == "stream_structured_predict":
        return list(given)
    if way == "astream_structured_predict":
        return [each async for each in await given]
    return [await given if way.startswith("a") else given]


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
async def test_an_object_is_read_whatever_stands_around_it(free, way):
    for name in ("fenced", "reasoned"):
        *_, last = await shown(free, way, name)
        assert last == Ship.model_validate(FERRY)


class Even(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def _check(cls, number: int) -> int:
        if number % 2:
            raise ValueError("it is odd")
        return number


class Names(BaseModel):
    names: list[str]


@pytest.mark.parametrize("way", WAYS)
async def test_a_reply_that_is_no_object_of_the_class_is_an_error(llm, free, way):
    cases: list[tuple[Any, str, Any, str]] = [
        (free, "wrong", Ship, "kind"),
        (free, "unknown", Ship, "json"),
        (llm, "endless", Names, "max_tokens"),
        (llm, "odd", Even, "it is odd"),
    ]
    for asked, name, kind, message in cases:
        with recorded() as record, pytest.raises(MalformedReplyError, match=message):
            await shown(asked, way, name, kind, max_new_tokens=90 if kind is Ship else 40)
        assert len(record.named("LLMChatEndEvent")) == 1  # no other reply is requested


@pytest.mark.parametrize("way", WAYS[2:])
async def test_a_stream_shows_objects_that_grow(llm, way):
    objects = await shown(llm, way, "bare", max_words=1)
    names = [getattr(each, "name", None) or "" for each in objects]
    assert all(FERRY["name"].startswith(name) for name in names)
    assert len({*names}) >= 3
    assert not isinstance(objects[0], Ship)
    assert objects[-1] == Ship.model_validate(FERRY)


@pytest.mark.quick
def test_members_read_the_schema_as_it_is():
    seen: list[str] = []
    with AdaFuseEngine([scripted(lambda prompt: seen.append(prompt) or WRITTEN)]) as engine:
        llm = AdaFuseLLM(engine=engine, system_prompt="Be brief.")
        llm.structured_predict(Ship, PROMPT, name="it")
        form = {"type": "json_schema", "json_schema": {"schema": Ship.model_json_schema()}}
        asked = [ChatMessage("Be brief.", role="system"), ChatMessage("Describe the ship it.")]
        reply = llm.chat(asked, response_format=form)
        with pytest.raises(InvalidInputError, match="regex"):
            llm.chat([ChatMessage("?")], response_format=form, regex="a")
    assert reply.message.content == WRITTEN
    (prompt,) = {text for text in seen if "JSON schema" in text}
    assert json.dumps(Ship.model_json_schema(), separators=(",", ":")) in prompt
    assert prompt.index("Be brief.") < prompt.index("JSON schema") < prompt.index("Describe")
