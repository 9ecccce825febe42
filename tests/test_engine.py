"""What an engine refuses, whom it lets decode, and runs, token counts and views of strategies."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    ContextWindowError,
    DecodingError,
    Generation,
    GrammarError,
    InvalidInputError,
    InvalidOptionError,
    Request,
    RequestCancelledError,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from tests.support.compare import approximately, as_data
from tests.support.models import Recipe, engine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.quick


TURNS = [{"role": "user", "content": "Where does the ferry go?"}]


def always(text: str) -> dict[str, float]:
    return {"<end>": 0.9, "a": 0.1}


def letters(text: str) -> dict[str, float]:
    return {"a": 0.6, "b": 0.3, "<end>": 0.1}


@pytest.fixture
def pair() -> AdaFuseEngine:
    return AdaFuseEngine([FakeBackend("one", always), FakeBackend("two", always, (), 20)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "either a prompt or messages"),
        ({"prompt": "x", "messages": TURNS}, "either"),
        ({"prompt": "   "}, "empty"),
        ({"prompt": 5}, "int"),
        ({"prompt": "x", "weights": [1.0]}, "weights.*2.*1"),
        (
            {"prompt": "x", "weights": {"one": 0, "two": 1}, "use": "one"},
            r"members that decode \(one\) have weight 0",
        ),
        ({"prompt": "x", "use": ["one", "tow"]}, "no member 'tow'.*'two'"),
        ({"prompt": "x", "weights": {"one": 1.0, "tow": 1.0}}, "tow"),
        ({"prompt": "x", "timeout": float("nan")}, "timeout must be a positive number"),
        ({"prompt": "x", "cancel": True}, r"threading\.Event"),
        ({"prompt": "x", "max_wrds": 1}, "Did you mean 'max_words'"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_computed(
    pair: AdaFuseEngine, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        pair.generate(**arguments)
    with pytest.raises(InvalidInputError, match=says):
        pair.stream(**arguments)
    assert all(getattr(member, "passes", 0) == 0 for member in pair.backends)


def test_iterators_are_read_once_and_settings_of_another_kind_are_named(
    pair: AdaFuseEngine,
) -> None:
    texts: Any = iter([" a", " b"])
    assert [each.text for each in pair.score("x", texts).texts] == [" a", " b"]
    members: Any = iter(pair.backends)
    assert AdaFuseEngine(members).members == pair.members
    for name, kind in (("config", "AdaFuseConfig"), ("runtime", "RuntimeConfig")):
        given: Any = {name: {"max_new_tokens": 4}}
        with pytest.raises(InvalidInputError, match=rf"pass {kind}\(\.\.\.\)"):
            AdaFuseEngine(pair.backends, **given)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"messages": TURNS}, r"messages=\[conversation, \.\.\.\].*got \[{"),
        ({"prompts": TURNS}, r"texts.*messages=\[conversation, \.\.\.\]"),
        ({"prompts": "x"}, "list of prompts"),
        ({"messages": TURNS[0]}, "each conversation is a list"),
        ({"prompts": ["x"], "messages": [TURNS]}, "list of"),
    ],
)
def test_a_batch_of_the_wrong_form_is_refused_with_the_right_form(
    pair: AdaFuseEngine, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        pair.generate_batch(**arguments)


def test_an_engine_needs_members_with_different_names() -> None:
    with pytest.raises(InvalidInputError, match="at least one member"):
        AdaFuseEngine([])
    with pytest.raises(InvalidInputError, match="different names"):
        AdaFuseEngine([FakeBackend("one", always), FakeBackend("one", always)])
    with pytest.raises(InvalidOptionError, match="weights"):
        AdaFuseEngine([FakeBackend("one", always)], AdaFuseConfig(weights=(1.0, 1.0)))


def test_some_members_decode_as_an_engine_of_them_would() -> None:
    recipes = (Recipe(seed=1), Recipe("gpt2", "sentencepiece", seed=2), Recipe("gpt2", seed=3))
    names = [recipe.name for recipe in recipes]
    weights = dict(zip(names, (0.2, 1.0, 0.5), strict=True))
    ensemble = engine(*recipes)
    some = ensemble.generate("The", max_new_tokens=8, use=[names[2], names[0]], weights=weights)
    pair = engine(recipes[0], recipes[2]).generate("The", max_new_tokens=8, weights=[0.2, 0.5])
    assert set(some.usage.forward_passes) == {names[0], names[2]}
    assert as_data(some)["rounds"] == approximately(as_data(pair)["rounds"])


def test_no_scorable_candidate_is_an_error_not_a_silence() -> None:
    def impossible(text: str) -> dict[str, float]:
        return {"a": 0.0, "b": 0.0}

    ensemble = AdaFuseEngine([FakeBackend("one", impossible)])
    with ensemble, pytest.raises(DecodingError):
        ensemble.generate("x")


def test_a_prompt_without_room_names_all_members_that_it_fills() -> None:
    names = {"oak": 8, "elm": 90, "ash": 9}
    members = [FakeBackend(n, always, (), window) for n, window in names.items()]
    with AdaFuseEngine(members) as engine:
        assert engine.context_window == 8
        assert engine.generate("x" * 7).finish_reason == "stop"
        with pytest.raises(ContextWindowError, match=r"8 tokens.*'oak'.*window of 8.*leave these"):
            engine.generate("z" * 8)
        with pytest.raises(ContextWindowError, match=r"'oak'.*'ash'.*or leave these members out"):
            engine.generate("z" * 20)
        with pytest.raises(ContextWindowError, match=r"Shorten the prompt\.$"):
            engine.generate("z" * 100)


def test_a_vocabulary_that_cannot_be_read_is_read_once() -> None:
    pytest.importorskip("llguidance")

    class Unreadable(FakeBackend):
        follows_grammars = True
        tried = 0

        def grammar_tokenizer(self) -> Any:
            self.tried += 1
            raise ValueError("its tokens are broken")

    member = Unreadable("one", always)
    with AdaFuseEngine([member]) as engine:
        for _ in range(2):
            with pytest.raises(GrammarError, match=r"'one'.*its tokens are broken"):
                engine.generate("x", regex="a")
    assert member.tried == 1


# Runs, token counts, views ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> Iterator[AdaFuseEngine]:
    with AdaFuseEngine.from_embedded(config=AdaFuseConfig(max_new_tokens=12)) as engine:
        yield engine


async def test_a_run_has_all_responses_of_a_request(embedded: AdaFuseEngine) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 7, "n": 3, "max_new_tokens": 12}
    run = await embedded.aopen([Request(messages=TURNS, options=drawn)])
    events = [each async for each in run]
    whole = embedded.generate(messages=TURNS, **drawn)
    for number, each in enumerate((whole, *whole.alternatives)):
        own = [event for index, event in events if index == number]
        assert "".join(event.text for event in own) == each.text
        generation = own[-1].generation
        assert generation is not None
        assert (generation.text, generation.seed) == (each.text, each.seed)
        assert [event.round for event in own] == list(generation.rounds)
        assert all(0 < played.elapsed < 60 for played in generation.rounds)


async def test_requests_are_checked_when_they_are_opened() -> None:
    engine = AdaFuseEngine([FakeBackend("one", letters)])
    with pytest.raises(InvalidInputError, match="input 1 of the batch: the prompt is empty"):
        await engine.aopen([Request(prompt="x"), Request(prompt="")])
    with pytest.raises(InvalidOptionError, match="a stream has one response; got 2"):
        engine.stream("x", n=2, temperature=1)


async def test_a_run_that_is_closed_or_forgotten_ends() -> None:
    engine = AdaFuseEngine([FakeBackend("one", lambda text: {"a": 0.9, "b": 0.1})])
    endless = Request(prompt="x", options={"max_new_tokens": 100_000})
    run = await engine.aopen([endless])
    events = aiter(run)
    await anext(events)
    run.close()
    run.close()
    with pytest.raises(RequestCancelledError, match="the run was closed"):
        [event async for event in events]
    forgotten = iter(engine.open([endless]))
    next(forgotten)
    del forgotten
    await asyncio.to_thread(wait_until, lambda: not engine.scheduler.running)


def test_a_cancelled_choice_is_an_error() -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(RequestCancelledError, match="before a text was chosen"):
        AdaFuseEngine([FakeBackend("one", letters)]).choose("x", choices=["a", "b"], cancel=cancel)


def test_choices_have_room_for_the_whitespace_that_members_write_before_them() -> None:
    def begins(text: str) -> dict[str, float]:
        return {END: 1.0} if text[-1] in "so" else {"\n\n": 0.6, "Yes": 0.2, "No": 0.1}

    words = ["Yes", " Yes", "No", " No", "\n\n"]
    asked: Any = {"messages": TURNS, "choices": ["Yes", "No"], "max_new_tokens": 1}
    prompt = AdaFuseEngine([FakeBackend("one", begins, words)]).encode_prompt(messages=TURNS)["one"]
    for room, error in ((2, nullcontext()), (1, pytest.raises(ContextWindowError, match="room"))):
        member = FakeBackend("one", begins, words, len(prompt) + room)
        with error:
            assert AdaFuseEngine([member]).choose(**asked).text == "Yes"


def test_equal_requests_of_a_run_are_cancelled_apart() -> None:
    cancels = [threading.Event(), threading.Event()]
    cancels[0].set()
    requests = [Request(prompt="x", options={"max_new_tokens": 3}, cancel=e) for e in cancels]
    assert requests[0] == requests[1]
    results = AdaFuseEngine([FakeBackend("one", letters)]).open(requests).results()
    assert [each.finish_reason for each in results] == ["cancelled", "length"]


def test_the_requests_of_a_run_can_differ() -> None:
    engine = AdaFuseEngine([FakeBackend("one", letters)])
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


def test_a_view_shares_the_limits_and_the_end_of_its_engine() -> None:
    config = AdaFuseConfig(max_words=2, max_new_tokens=4)
    engine = AdaFuseEngine([FakeBackend("one", letters)], config)
    view = engine.with_strategy("single")
    assert view.config == AdaFuseConfig(max_new_tokens=4)  # the others are not used
    assert view.generate("x").usage.completion_tokens == {"one": 4}
    view.close()
    assert engine.closed


def test_results_are_json_without_nan() -> None:
    """Also where a member can say nothing about a candidate."""

    def only_a(text: str) -> dict[str, float]:
        return {"a": 0.5, "b": 0.5, " ": 0.0} if text == ">" else {"<end>": 1.0}

    def only_c(text: str) -> dict[str, float]:
        return {"c": 0.6, "d": 0.4} if text == ">" else {"<end>": 1.0}

    with AdaFuseEngine([FakeBackend("one", only_a), FakeBackend("two", only_c)]) as ensemble:
        generation = ensemble.generate(">")
    data = json.loads(generation.model_dump_json(), parse_constant=pytest.fail)
    assert data["text"] == generation.text == str(generation)
    assert data["rounds"][0]["candidates"][0]["nll"].keys() == {"one"}
    assert Generation.model_validate(data) == generation


def test_a_cut_response_names_whether_its_limit_is_the_default() -> None:
    endless = AdaFuseEngine([FakeBackend("one", lambda _: {"a": 0.9, "b": 0.1})])
    by_default = endless.generate("x")
    asked = endless.generate("x", max_new_tokens=256)
    assert by_default.cut_by == "the default limit of 256 tokens (max_new_tokens)"
    assert asked.cut_by == "the limit of 256 tokens (max_new_tokens)"
