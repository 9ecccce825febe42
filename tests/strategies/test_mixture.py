"""Mixtures of words with their ends."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, MemberError
from adafuse_llm.adapters.logprobs import openai_logprobs
from adafuse_llm.backends import FakeBackend, Query, QueryResult
from adafuse_llm.backends.fake import END
from adafuse_llm.strategies import Mixture
from tests.reference import Options, WordMixture, decode
from tests.support.compare import assert_same
from tests.support.models import PAIR, TRIPLE, Recipe, backend, reference

TOLERANCE = 1e-8
PROMPTS = ("The keeper lit the lamp and", "def f(n):\n    ", "Once: ")


def fake(name: str, after: dict[str, dict[str, float]]) -> FakeBackend:
    texts = {text for row in after.values() for text in row} - {END}
    texts |= {letter for text in ("So:", *texts) for letter in text}
    rule = lambda text: after.get(text[3:], {END: 1.0})  # noqa: E731
    return FakeBackend(name, rule, sorted(texts), is_complete=True)


@pytest.mark.quick
def test_a_word_counts_with_its_end_and_not_per_token() -> None:
    """Per token, "Gr" + "az" + "." is likelier (mean 0.9) than "Vienna" + "." (mean 1.1)."""
    after = {
        "": {" Vienna": 0.4, " Gr": 0.1, " x": 0.5},
        " Vienna": {".": 0.5, " is": 0.25, END: 0.25},
        " Gr": {"az": 1.0},
        " Graz": {".": 1.0},
        " x": {"y": 0.1, " z": 0.05, "w": 0.85},
        " xw": {" z": 0.1, "q": 0.9},
    }
    with AdaFuseEngine([fake("one", after)], strategy=Mixture()) as engine:
        first = engine.generate("So:", branching_factor=3).rounds[0]
    found = {each.text: math.exp(-each.score) for each in first.candidates if each.score}
    assert found == pytest.approx({" Vienna.": 0.2, " Graz.": 0.1, " xwq": 0.5 * 0.85 * 0.9})


@pytest.mark.quick
@pytest.mark.parametrize(("sizes", "asked"), [((3, 1), ["one"]), ((3, None), ["one", "other"])])
def test_members_weigh_as_much_as_they_have_parameters(
    sizes: Sequence[int | None], asked: list[str]
) -> None:
    """With three quarters of the weight on a word of 0.8, the other member is not asked."""
    members = [fake("one", {"": {" a": 0.8, " b": 0.2}}), fake("other", {"": {" a": 1.0}})]
    for member, size in zip(members, sizes, strict=True):
        member.parameters = size
    with AdaFuseEngine(members, strategy=Mixture()) as engine:
        first = engine.generate("So:", max_new_tokens=1).rounds[0].candidates[0]
        assert list(first.nll) == asked
        own = engine.generate("So:", max_new_tokens=1, weights=(1, 1)).rounds[0].candidates[0]
        assert list(own.nll) == ["one", "other"]


def test_log_probabilities_are_those_of_the_member_with_the_highest_weight() -> None:
    members = [fake("small", {"": {" a": 0.3}}), fake("large", {"": {" a": 0.4}})]
    members[0].parameters, members[1].parameters = 1, 9
    with AdaFuseEngine(members, strategy=Mixture()) as engine:
        rounds = engine.generate("So:", max_new_tokens=1, logprobs=True).rounds
    (token,) = openai_logprobs(rounds)["content"]
    assert token["logprob"] == pytest.approx(math.log(0.4))
    after = {"": {" a": 0.4}, " a": {" b": 0.3, END: 0.1}}
    pair = [fake("one", after), fake("two", {"": {" a": 0.2}, " a": {" b": 0.9}})]
    with AdaFuseEngine(pair, strategy="adafuse") as engine:
        rounds = engine.generate("So:", max_new_tokens=2, logprobs=True, max_words=1).rounds
    assert [next(iter(done.logprobs)) for done in rounds] == ["one"] * len(rounds)


@pytest.mark.quick
def test_a_word_with_more_than_half_of_the_weight_wins_without_the_others() -> None:
    after = {"": {" a": 0.7, " b": 0.3}, " a": {" b": 0.6, END: 0.4}}
    members = [fake("small", after), fake("large", after)]
    with AdaFuseEngine(members, strategy=Mixture()) as engine:
        sure = engine.generate("So:", weights=(1, 3), max_new_tokens=1)
        unsure = engine.generate("So:", weights=(1, 2), max_new_tokens=1)
    assert sure.usage.forward_passes == {"small": 0, "large": 2}
    assert sure.rounds[0].candidates[0].nll == pytest.approx({"large": -math.log(0.7)})
    assert sure.rounds[0].candidates[0].score == pytest.approx(-math.log(0.75 * 0.7))
    assert unsure.usage.forward_passes == {"small": 2, "large": 2}
    assert unsure.rounds[0].candidates[0].score == pytest.approx(-math.log(0.7))
    assert sure.text == unsure.text == " a"


@pytest.mark.quick
def test_a_member_that_gives_a_word_a_probability_of_0_has_been_asked() -> None:
    rows = {" a": 0.7, " b": 0.3}, {" b": 1.0, " a": 0.0}, {" a": 1.0}
    members = [fake(f"m{number}", {"": row}) for number, row in enumerate(rows)]
    with AdaFuseEngine(members, strategy=Mixture()) as engine:
        first = engine.generate("So:", weights=(4, 2, 2), max_new_tokens=1).rounds[0]
    assert list(first.candidates[0].nll) == ["m0", "m2"]
    assert first.asked == ("m0", "m1", "m2")


@pytest.mark.parametrize("is_sharp", [False, True])
@pytest.mark.parametrize(("recipes", "branches"), [(TRIPLE, 1), (PAIR, 3)])
def test_responses_are_those_without_any_cache(
    recipes: Sequence[Recipe], branches: int, is_sharp: bool
) -> None:
    """Sharp members have words that win early, which are those that would win."""
    if is_sharp:
        recipes = [replace(recipe, spread=1.5, space_bias=6.0) for recipe in recipes]
    counts = check(recipes, branching_factor=branches)
    assert not is_sharp or min(counts) == 1 < max(counts)


def check(recipes: Sequence[Recipe], **options: Any) -> list[int]:
    """Compare responses with the reference, and return the numbers of candidates by round."""
    counts = []
    members = [backend(recipe) for recipe in recipes]
    sizes = [member.parameters for member in members]
    options["max_new_tokens"] = 14
    for number, prompt in enumerate(PROMPTS):
        options["weights"] = (4.0, 0.25, 1.0)[: len(recipes)] if number else None
        options["regex"] = "[a-e ]{1,12}x?" if number == 2 else None
        expected, whole = (
            decode(
                [reference(recipe) for recipe in recipes],
                prompt,
                Options(**options | {"weights": options["weights"] or sizes}, max_words=1),
                rule=WordMixture(early=early),
            )
            for early in (True, False)
        )
        with AdaFuseEngine(members, strategy=Mixture()) as engine:
            result = engine.generate(prompt, **options)
        assert_same(result, expected, TOLERANCE)
        assert result.text == whole.text
        counts += [len(each.candidates) for each in result.rounds if not each.forced]
    return counts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_word_that_the_window_cuts_counts_without_an_end(temperature: float) -> None:
    """The grammar permits no end there, so the word would have a probability of 0."""
    prompt = PROMPTS[0]
    size = len(backend(PAIR[0]).codec.encode_prompt(prompt))
    recipes = [replace(each, window=size + 5, space_bias=-9.0) for each in PAIR[:1]]
    options: dict[str, Any] = {"regex": "[a-z]{60}", "max_word_tokens": 99}
    options |= {"temperature": temperature, "seed": 3, "max_new_tokens": 40}
    rule = WordMixture()
    expected = decode(list(map(reference, recipes)), prompt, Options(**options), rule=rule)
    with AdaFuseEngine(list(map(backend, recipes)), strategy=Mixture()) as engine:
        found = engine.generate(prompt, **options)
    assert_same(found, expected, TOLERANCE)
    assert found.finish_reason == "length"
    assert found.logprob is not None
    assert math.isfinite(found.logprob)


class Endless(FakeBackend):
    """A backend that ignores `Query.word_ends`."""

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        return super().evaluate([replace(query, word_ends=False) for query in queries])


@pytest.mark.quick
def test_a_backend_that_does_not_say_how_likely_words_end_is_named() -> None:
    with AdaFuseEngine([Endless("short", lambda _: {" a": 0.6, END: 0.4}, [" a"])]) as engine:
        assert engine.generate("So:", max_new_tokens=3).text
        with pytest.raises(MemberError, match=r"'short'.*no word_end_logprob.*such as 'adafuse'"):
            engine.with_strategy("mixture").generate("So:", max_new_tokens=3)
        assert engine.generate("So:", max_new_tokens=3).text
