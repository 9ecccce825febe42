"""What an engine refuses, and whom it lets decode."""

from __future__ import annotations

from typing import Any

import pytest

import adafuse_llm
from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    ContextWindowError,
    GrammarError,
    InvalidInputError,
    InvalidOptionError,
)
from adafuse_llm.backends import FakeBackend
from tests.support.compare import approximately, as_data
from tests.support.models import Recipe, engine


def always(text: str) -> dict[str, float]:
    return {"<end>": 0.9, "a": 0.1}


@pytest.fixture
def pair() -> AdaFuseEngine:
    return AdaFuseEngine([FakeBackend("one", always), FakeBackend("two", always, (), 20)])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "either a prompt or messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "   "}, "empty"),
        ({"prompt": 5}, "int"),
        ({"messages": []}, "empty"),
        ({"prompt": "x", "weights": [1.0]}, "weights.*2.*1"),
        ({"prompt": "x", "weights": {"one": 1.0}}, "weights.*missing: two"),
        (
            {"prompt": "x", "weights": {"one": 0, "two": 1}, "use": "one"},
            r"members that decode \(one\) have weight 0",
        ),
        ({"prompt": "x", "use": ["one", "tow"]}, "no member 'tow'.*'two'"),
        ({"prompt": "x", "use": []}, "use"),
        ({"prompt": "x", "weights": {"one": 1.0, "tow": 1.0}}, "tow"),
        ({"prompt": "x", "max_words": 0}, "max_words"),
        ({"prompt": "x", "timeout": 0}, "timeout must be a positive number"),
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


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, r"messages=\[conversation\]"),
        (
            {"prompts": [{"role": "user", "content": "x"}]},
            r"text.*messages=\[conversation, \.\.\.\]",
        ),
        ({"prompts": [[{"role": "user", "content": "x"}]]}, "text.*messages="),
        ({"prompts": 5}, "list of prompts"),
        ({"prompts": "x"}, "list of prompts"),
        ({"messages": {"role": "user", "content": "x"}}, "list of conversations"),
        ({"prompts": ["x"], "messages": [[{"role": "user", "content": "x"}]]}, "list of"),
    ],
)
def test_a_batch_of_the_wrong_form_is_refused_with_the_right_form(
    pair: AdaFuseEngine, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        pair.generate_batch(**arguments)


@pytest.mark.quick
def test_an_engine_needs_members_with_different_names() -> None:
    with pytest.raises(InvalidInputError, match="at least one member"):
        AdaFuseEngine([])
    with pytest.raises(InvalidInputError, match="members is empty"):
        AdaFuseEngine.from_pretrained([])
    with pytest.raises(InvalidInputError, match="different names"):
        AdaFuseEngine([FakeBackend("one", always), FakeBackend("one", always)])
    with pytest.raises(InvalidOptionError, match="weights"):
        AdaFuseEngine([FakeBackend("one", always)], AdaFuseConfig(weights=(1.0, 1.0)))


@pytest.mark.quick
def test_some_members_decode_as_an_engine_of_them_would() -> None:
    recipes = (Recipe(seed=1), Recipe("gpt2", "sentencepiece", seed=2), Recipe("gpt2", seed=3))
    names = [recipe.name for recipe in recipes]
    weights = dict(zip(names, (0.2, 1.0, 0.5), strict=True))
    ensemble = engine(*recipes)
    some = ensemble.generate("The", max_new_tokens=8, use=[names[2], names[0]], weights=weights)
    pair = engine(recipes[0], recipes[2]).generate("The", max_new_tokens=8, weights=[0.2, 0.5])
    assert set(some.usage.forward_passes) == {names[0], names[2]}
    assert as_data(some)["rounds"] == approximately(as_data(pair)["rounds"])


@pytest.mark.quick
def test_no_scorable_candidate_is_an_error_not_a_silence() -> None:
    def impossible(text: str) -> dict[str, float]:
        return {"a": 0.0, "b": 0.0}

    ensemble = AdaFuseEngine([FakeBackend("one", impossible)])
    with ensemble, pytest.raises(adafuse_llm.DecodingError):
        ensemble.generate("x")


@pytest.mark.quick
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


@pytest.mark.quick
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
