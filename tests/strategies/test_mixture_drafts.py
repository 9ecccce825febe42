"""A smaller member drafts for the larger one of a mixture, and changes no result."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.backends import FakeBackend, Query, QueryResult
from adafuse_llm.decoding.draft import Drafter
from adafuse_llm.decoding.member import MemberState
from tests.reference import Options, WordMixture, decode
from tests.strategies.test_mixture import PROMPTS
from tests.support.compare import TOLERANCE, approximately, as_data, assert_same
from tests.support.models import TRIPLE, Recipe, backend, reference

LARGE = Recipe("llama", "bytelevel", seed=31, spread=1.5, space_bias=6.0)
NEAR = Recipe("gpt2", "bytelevel", seed=32, spread=0.5, space_bias=4.0)
OTHER = Recipe("gpt2", "sentencepiece", seed=32, spread=1.0, space_bias=5.0)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "form",
    [{}, {"regex": "[a-e ]{1,12}x?"}, {"branching_factor": 2, "margin_threshold": 0.9}],
    ids=["free", "form", "branches"],
)
@pytest.mark.parametrize(
    "recipes",
    [(LARGE, NEAR), (OTHER, LARGE), tuple(replace(each, spread=1.5) for each in TRIPLE)],
    ids=["one vocabulary", "two", "three"],
)
def test_drafts_change_no_round(recipes: Sequence[Recipe], form: dict[str, Any]) -> None:
    members = [backend(recipe) for recipe in recipes]
    for recipe, member in zip(recipes, members, strict=True):
        member.parameters = 1000 if recipe.arch == "llama" else 10
        member.token_cost = 0.02
    sizes = tuple(float(member.parameters or 0) for member in members)
    for number, prompt in enumerate(PROMPTS):
        options: dict[str, Any] = {"max_new_tokens": 20, "stop": ("x",) * (number == 1)}
        options |= {"branching_factor": 1, **form}
        expected = decode(
            [reference(recipe) for recipe in recipes],
            prompt,
            Options(**options, weights=sizes, max_words=1),
            rule=WordMixture(),
        )
        with AdaFuseEngine(members, strategy="mixture") as engine:
            found = engine.generate(prompt, **options)
            *_, last = engine.stream(prompt, **options)
        assert_same(found, expected, TOLERANCE)
        assert last.generation is not None
        assert as_data(last.generation) == approximately(as_data(found))


class Counted(FakeBackend):
    """A member that writes the alphabet, and counts its passes of any size.

    Args:
        mistakes: letters that it writes wrong.
        until: length of the texts from which on it makes no mistake.
    """

    def __init__(
        self, name: str, parameters: int, mistakes: str = "", until: float = math.inf
    ) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"

        def rule(text: str) -> dict[str, float]:
            right = letters[(letters.find(text[-1]) + 1) % 26]
            return {" o" if right in mistakes and len(text) < until else f" {right}": 0.9, "o": 0.1}

        super().__init__(name, rule, [*(f" {each}" for each in letters), *" So:"], is_complete=True)
        self.parameters = parameters
        self.sizes: list[int] = []

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        self.sizes += [len(query.evaluate) for query in queries]
        return super().evaluate(queries)


def passes(large: Counted, small: Counted, *, drafting: bool = True) -> tuple[int, int]:
    """The passes of two members in a response."""
    runtime = RuntimeConfig(drafting=drafting)
    with AdaFuseEngine([large, small], strategy="mixture", runtime=runtime) as engine:
        found = engine.generate("So:", max_new_tokens=60)
    assert found.text == "".join(f" {chr(97 + place % 26)}" for place in range(60))
    return len(large.sizes), len(small.sizes)


@pytest.mark.quick
def test_a_small_member_that_is_mostly_right_saves_passes_of_the_large_one() -> None:
    assert passes(Counted("large", 100), Counted("small", 10), drafting=False) == (61, 0)
    large, small = passes(Counted("large", 100), Counted("small", 10, mistakes="m"))
    assert large < 61 / 4
    assert small < 61 + 6


@pytest.mark.quick
def test_members_do_not_draft_where_little_can_be_saved() -> None:
    wrong = Counted("small", 10, mistakes="abcdefghijklmnopqrstuvw")
    assert passes(Counted("large", 100), wrong)[1] < 30
    assert passes(Counted("large", 100), Counted("small", 60))[1] == 0
    slow = Counted("large", 100)
    slow.token_cost = 0.8
    assert passes(slow, Counted("small", 10))[1] == 0
    elsewhere = Counted("small", 10)
    elsewhere.is_remote = True
    assert passes(Counted("large", 100), elsewhere)[1] == 0


@pytest.mark.quick
def test_a_small_member_that_was_wrong_drafts_again_later() -> None:
    small = Counted("small", 10, "abcdefghijklmnopqrstuvwxyz", until=20)
    assert passes(Counted("large", 100), small)[0] < 40


@pytest.mark.quick
@pytest.mark.parametrize(
    ("size", "token_cost", "count"), [(10, 0.0, 4), (10, 0.02, 4), (50, 0.0, 1), (50, 0.1, 0)]
)
def test_a_draft_is_as_long_as_saves_most(size: int, token_cost: float, count: int) -> None:
    """The larger member then pays (1 + count * cost) / (1 + 0.7 + ... + 0.7^count) per token."""
    large = Counted("large", 100)
    large.token_cost = token_cost
    members = [MemberState(each, [1], 2, 1.0) for each in (Counted("small", size), large)]
    assert Drafter(*members).plan()[1] == count
