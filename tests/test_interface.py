"""The parts of an engine that calls are built on: runs, token counts, and views of strategies."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    Generation,
    InvalidInputError,
    InvalidOptionError,
    Request,
    RequestCancelledError,
    Round,
)
from adafuse_llm.backends import FakeBackend

DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7, "n": 3, "max_new_tokens": 12}
TURNS = [{"role": "user", "content": "Where does the ferry go?"}]


@pytest.fixture(scope="module")
def embedded() -> Iterator[AdaFuseEngine]:
    with AdaFuseEngine.from_embedded(config=AdaFuseConfig(max_new_tokens=12)) as engine:
        yield engine


def always(text: str) -> dict[str, float]:
    return {"a": 0.6, "b": 0.3, "<end>": 0.1}


def endless() -> AdaFuseEngine:
    return AdaFuseEngine([FakeBackend("one", lambda text: {"a": 0.9, "b": 0.1})])


ENDLESS = Request(prompt="x", options={"max_new_tokens": 100_000})


async def test_a_run_has_all_responses_of_a_request(embedded: AdaFuseEngine) -> None:
    seen: list[Round] = []
    run = await embedded.aopen([Request(messages=TURNS, options=DRAWN)], seen.append)
    events = [each async for each in run]
    whole = embedded.generate(messages=TURNS, **DRAWN)
    for number, each in enumerate((whole, *whole.alternatives)):
        own = [event for index, event in events if index == number]
        assert "".join(event.text for event in own) == each.text
        generation = own[-1].generation
        assert generation is not None
        assert (generation.text, generation.seed) == (each.text, each.seed)
    assert seen == [event.round for _, event in events]


@pytest.mark.quick
async def test_requests_are_checked_when_they_are_opened() -> None:
    engine = AdaFuseEngine([FakeBackend("one", always)])
    with pytest.raises(InvalidInputError, match="either a prompt or messages"):
        await engine.aopen([Request()])
    with pytest.raises(InvalidInputError, match="input 1 of the batch: the prompt is empty"):
        await engine.aopen([Request(prompt="x"), Request(prompt="")])
    with pytest.raises(InvalidOptionError, match="a stream has one response; got 2"):
        engine.stream("x", n=2, temperature=1)


@pytest.mark.quick
async def test_a_run_that_is_closed_or_forgotten_ends() -> None:
    engine = endless()
    run = await engine.aopen([ENDLESS])
    events = aiter(run)
    await anext(events)
    run.close()
    run.close()
    with pytest.raises(RequestCancelledError, match="the run was closed"):
        [event async for event in events]
    forgotten = iter(engine.open([ENDLESS]))
    next(forgotten)
    del forgotten
    for _ in range(500):
        if not engine.scheduler.running:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the decode goes on")


@pytest.mark.quick
def test_a_cancelled_choice_is_an_error() -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(RequestCancelledError, match="before a text was chosen"):
        AdaFuseEngine([FakeBackend("one", always)]).choose("x", choices=["a", "b"], cancel=cancel)


@pytest.mark.quick
def test_the_requests_of_a_run_can_differ() -> None:
    engine = AdaFuseEngine([FakeBackend("one", always)])
    run = engine.open(
        [
            Request(prompt="x", options={"max_new_tokens": 2}),
            Request(prompt="x", texts=["a", "b"]),
            Request(messages=TURNS, options={"choices": ["a", "b"]}),
        ]
    )
    short, scores, chosen = run.results()
    assert short.text == engine.generate("x", max_new_tokens=2).text
    assert scores.texts == engine.score("x", ["a", "b"]).texts
    assert chosen.text == engine.choose(messages=TURNS, choices=["a", "b"]).text


def test_encoded_prompts_have_the_tokens_that_usage_counts(embedded: AdaFuseEngine) -> None:
    for arguments in (
        {"prompt": "The ferry goes"},
        {"messages": TURNS},
        {"prompt": "a", "use": "wren"},
    ):
        counts = embedded.generate(**arguments, max_new_tokens=1).usage.prompt_tokens
        if "use" in arguments:
            assert [*counts] == ["wren"]
        encoded = embedded.encode_prompt(**arguments)
        assert {name: len(ids) for name, ids in encoded.items()} == counts
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    with_tool = embedded.encode_prompt(messages=TURNS, tools=[tool])
    without = embedded.encode_prompt(messages=TURNS)
    assert all(len(with_tool[name]) > len(ids) for name, ids in without.items())
    assert {*embedded.encode_prompt("")} == {*embedded.members}  # an empty prompt is counted, too


@pytest.mark.quick
def test_a_view_shares_the_limits_and_the_end_of_its_engine() -> None:
    config = AdaFuseConfig(max_words=2, max_new_tokens=4)
    engine = AdaFuseEngine([FakeBackend("one", always)], config)
    view = engine.with_strategy("single")
    assert view.config == AdaFuseConfig(max_new_tokens=4)  # the others are not used
    assert view.generate("x").usage.completion_tokens == {"one": 4}
    view.close()
    assert engine.closed


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


@pytest.mark.quick
def test_results_are_json_without_nan() -> None:
    """Also where a member can say nothing about a candidate."""

    def only_a(text: str) -> dict[str, float]:
        return {"a": 0.5, "b": 0.5, " ": 0.0} if text == ">" else {"<end>": 1.0}

    def only_c(text: str) -> dict[str, float]:
        return {"c": 0.6, "d": 0.4} if text == ">" else {"<end>": 1.0}

    with AdaFuseEngine([FakeBackend("one", only_a), FakeBackend("two", only_c)]) as ensemble:
        generation = ensemble.generate(">")
    data = json.loads(generation.model_dump_json(), parse_constant=refuse)
    assert data["text"] == generation.text == str(generation)
    assert data["rounds"][0]["candidates"][0]["nll"].keys() == {"one"}
    assert Generation.model_validate(data) == generation
