"""The models of both frameworks with the members of a server."""

from typing import Any

import pytest
from langchain_core.decisions import Noul
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import Engine, InvalidInputError, RemoteEngine
from adafuse_llm.serving import create_app
from langchain_adafuse import AdaFuseDecisions, ChatAdaFuse, get_round_callback
from langchain_adafuse import AdaFuseLLM as TextAdaFuse
from tests.support.instruction_follower import answer
from tests.support.llama_calls import FORMS, ask
from tests.support.scripted import scripted_engine
from tests.support.serving import served


async def found(engine: Engine) -> list[Any]:
    """What applications get from an engine. `tests/test_client.py` compares the engines."""
    chat, llm = ChatAdaFuse(engine=engine), AdaFuseLLM(engine=engine)
    text = TextAdaFuse(engine=engine, temperature=0.8, seed=2, n=2)
    with get_round_callback() as rounds:
        chunks = [chunk.text async for chunk in chat.astream("Hello")]
    asked: Any = {"state": "Hello", "questions": {"polite": Noul(instructions="Polite?")}}
    weather = chat.bind_tools([{"title": "get_weather", "type": "object"}], max_tokens=200)
    called = [chunk.tool_call_chunks async for chunk in weather.astream("Hello")]  # type: ignore[attr-defined]
    pieces = [(each["name"], each["args"]) for chunk in called for each in chunk]
    assert len(pieces) > 1
    (drawn,) = (await text.agenerate(["Hello. Answer:"])).generations
    return [
        (chunks, [each["text"] for each in rounds.rounds], [each.text for each in drawn]),
        (chat.profile, chat.model_name, pieces),
        [(await ask(llm, path, "Hello")).texts for path in FORMS],
        (await AdaFuseDecisions(engine=engine).ainvoke(asked)).answers,
        (llm.metadata, len(llm.tokenizer("The mill"))),
    ]


async def test_the_models_give_the_same() -> None:
    with (
        scripted_engine(answer, max_words=2) as local,
        served(create_app(local)) as url,
        RemoteEngine(url) as remote,
    ):
        assert await found(remote) == await found(local)


@pytest.mark.quick
@pytest.mark.parametrize("model", [AdaFuseDecisions, ChatAdaFuse, TextAdaFuse, AdaFuseLLM])
def test_an_address_is_an_error_that_names_the_engine_for_servers(model: type[Any]) -> None:
    for option in ("engine", "base_url"):
        with pytest.raises(InvalidInputError, match=r"pass engine=RemoteEngine\(url\)"):
            model(**{option: "http://127.0.0.1:8000/v1"})
