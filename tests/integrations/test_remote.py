"""The adapters give the same with the members of a server as with members of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.adafuse import AdaFuseLLM
from pydantic import BaseModel

from adafuse_llm import (
    AdaFuseEngine,
    ContextWindowError,
    Engine,
    InvalidInputError,
    RemoteEngine,
    RequestTimeoutError,
)
from adafuse_llm.serving import create_app
from langchain_adafuse import AdaFuseLLM as TextAdaFuse
from langchain_adafuse import ChatAdaFuse, RoundCallbackHandler
from tests.support.instruction_follower import answer
from tests.support.llama_calls import FORMS, ask, recorded
from tests.support.scripted import scripted_engine
from tests.support.serving import served

LEFT_OUT = (
    *("load_duration", "prompt_eval_duration", "eval_duration", "total_duration"),
    *("elapsed", "seconds", "id", "run_id"),
    *("cached_tokens", "cache_read", "forward_passes", "tokens_processed"),
)
"""Times, ids, and costs that depend on earlier requests."""


@pytest.fixture(scope="module")
def local() -> Iterator[AdaFuseEngine]:
    with scripted_engine(answer, max_words=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def remote(local: AdaFuseEngine) -> Iterator[RemoteEngine]:
    with served(create_app(local)) as url, RemoteEngine(url) as engine:
        yield engine


def timeless(value: Any) -> Any:
    """A value without what differs between equal calls, with rounded numbers."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in LEFT_OUT}
    if isinstance(value, (list, tuple)):
        return [timeless(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


def get_weather(location: str) -> str:
    """Tells the weather at a location."""
    return f"It rains in {location}."


async def langchain_calls(engine: Engine) -> list[Any]:
    """What a LangChain application gets."""
    rounds = RoundCallbackHandler()
    chat = ChatAdaFuse(engine=engine, round_detail="full", callbacks=[rounds])
    text = TextAdaFuse(engine=engine, temperature=0.8, seed=2, n=2, top_logprobs=2)
    return [
        [chunk async for chunk in chat.astream("Hello")],
        chat.bind_tools([get_weather]).invoke("How is the weather?").tool_calls,
        chat.with_structured_output(Joke).invoke("Tell a joke. Reply in JSON."),
        (await text.agenerate(["Hello. Answer:", "Well? Answer:"])).generations,
        [{**each, "run_id": ""} for each in rounds.rounds],
        chat.get_num_tokens_from_messages([AIMessage("Hello")], tools=[get_weather]),
        (chat.profile, chat.model_name),
    ]


async def test_langchain_models_give_the_same(local: AdaFuseEngine, remote: RemoteEngine) -> None:
    assert timeless(await langchain_calls(remote)) == timeless(await langchain_calls(local))


async def llama_index_calls(engine: Engine) -> list[Any]:
    """What a LlamaIndex application gets."""
    llm = AdaFuseLLM(engine=engine)
    tool = FunctionTool.from_defaults(get_weather)
    with recorded() as record:
        said = [await ask(llm, path, "Hello") for path in FORMS]
    return [
        [(each.texts, each.deltas, [raw.model_dump() for raw in each.raws]) for each in said],
        [event.class_name() for event in record.handler.events],
        llm.predict_and_call([tool], "How is the weather?").response,
        llm.structured_predict(Joke, PromptTemplate("Tell a joke in JSON.")),
        llm.metadata.model_dump(),
        llm.prompt_helper().context_window,
    ]


async def test_llama_index_gives_the_same(local: AdaFuseEngine, remote: RemoteEngine) -> None:
    assert timeless(await llama_index_calls(remote)) == timeless(await llama_index_calls(local))


def test_errors_of_a_server_are_those_of_the_frameworks(remote: RemoteEngine) -> None:
    with pytest.raises(ContextOverflowError, match="context window"):
        ChatAdaFuse(engine=remote).invoke("word " * 9000)
    with pytest.raises(ContextWindowError, match="context window"):
        AdaFuseLLM(engine=remote).chat([ChatMessage("word " * 9000)])
    with pytest.raises(RequestTimeoutError):
        ChatAdaFuse(engine=remote, timeout=1e-6).invoke("Hello", min_new_tokens=200)


@pytest.mark.quick
@pytest.mark.parametrize("model", [ChatAdaFuse, TextAdaFuse, AdaFuseLLM])
def test_an_address_is_an_error_that_names_the_engine_for_servers(model: type[Any]) -> None:
    for option in ("engine", "base_url"):
        with pytest.raises(InvalidInputError, match=r"pass engine=RemoteEngine\(url\)"):
            model(**{option: "http://127.0.0.1:8000/v1"})
