"""Mixtures of words with their ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, MemberError, RuntimeConfig
from adafuse_llm.backends import FakeBackend, NodeQuery, NodeResult
from adafuse_llm.backends.fake import END
from adafuse_llm.strategies import Mixture
from tests.reference import Options, WordMixture, decode
from tests.support.compare import assert_same
from tests.support.models import Recipe, backend, reference

TOLERANCE = 1e-8
PAIR = (Recipe("llama", "bytelevel", seed=31), Recipe("gpt2", "sentencepiece", seed=32))
TRIPLE = (*PAIR, Recipe("llama", "unigram", seed=33))
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
def test_members_are_averaged_with_their_weights() -> None:
    one, other = {" a": 0.9, " b": 0.1}, {" a": 0.2, " b": 0.8}
    members = [fake("one", {"": one}), fake("other", {"": other})]
    with AdaFuseEngine(members, strategy=Mixture()) as engine:
        first = engine.generate("So:", weights=(1, 3)).rounds[0]
    found = {each.text: math.exp(-each.score) for each in first.candidates if each.score}
    assert found == pytest.approx({" a": 0.25 * 0.9 + 0.75 * 0.2, " b": 0.25 * 0.1 + 0.75 * 0.8})
    nll = first.candidates[0].nll
    assert nll == pytest.approx({"one": -math.log(0.9), "other": -math.log(0.2)})


@pytest.mark.parametrize("evidence", [0.0, 0.5])
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("recipes", [PAIR, TRIPLE], ids=["pair", "triple"])
def test_responses_are_those_without_any_cache(
    recipes: Sequence[Recipe], branches: int, evidence: float
) -> None:
    for number, prompt in enumerate(PROMPTS):
        options: dict[str, Any] = {"branching_factor": branches, "max_new_tokens": 14}
        options["weights"] = (1.5, 0.25, 1.0)[: len(recipes)] if number else None
        if number == 2:
            options["regex"] = "[a-e ]{1,12}x?"
        members = [reference(recipe) for recipe in recipes]
        expected = decode(
            members, prompt, Options(**options, max_words=1), rule=WordMixture(evidence)
        )
        for drafting in (False, True):
            with AdaFuseEngine(
                [backend(recipe) for recipe in recipes],
                strategy=Mixture(evidence=evidence),
                runtime=RuntimeConfig(drafting=drafting),
            ) as engine:
                assert_same(engine.generate(prompt, **options), expected, TOLERANCE)


class Endless(FakeBackend):
    """A backend that ignores `NodeQuery.word_ends`."""

    def evaluate(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        return super().evaluate([replace(query, word_ends=False) for query in queries])


@pytest.mark.quick
def test_a_backend_that_does_not_say_how_likely_words_end_is_named() -> None:
    with AdaFuseEngine([Endless("short", lambda _: {" a": 0.6, END: 0.4}, [" a"])]) as engine:
        assert engine.generate("So:", max_new_tokens=3).text
        with pytest.raises(MemberError, match=r"'short'.*no word_end_logprob.*such as 'adafuse'"):
            engine.with_strategy("mixture").generate("So:", max_new_tokens=3)
        assert engine.generate("So:", max_new_tokens=3).text
