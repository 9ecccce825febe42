"""Strategies besides AdaFuse: what defines each, and each against a second computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    Generation,
    InvalidInputError,
    InvalidOptionError,
    RuntimeConfig,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.strategies import (
    AdaFuse,
    FixedWords,
    Mixture,
    Single,
    Strategy,
    find_strategy,
)
from adafuse_llm.strategies.registry import NAMED
from tests.reference import Options, decode
from tests.support.compare import TOLERANCE, approximately, as_data, assert_same
from tests.support.models import LOSSY, PAIR, TRIPLE, Recipe, backend, reference

PROMPTS = (
    "The ferry to Orrin leaves at nine.",
    "Question: who keeps the light?\nAnswer:",
    "Caf\u00e9 \U0001f600 Orrin",
    "\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002\u4e2d\u6587",
    "def f():\n     ",
)


def run(
    strategy: Strategy | str,
    recipes: Sequence[Recipe],
    prompt: str | None = PROMPTS[0],
    *,
    drafting: bool = True,
    **options: Any,
) -> Generation:
    members = [backend(recipe) for recipe in recipes]
    runtime = RuntimeConfig(drafting=drafting)
    with AdaFuseEngine(members, strategy=strategy, runtime=runtime) as engine:
        return engine.generate(prompt, **options)


# Words ----------------------------------------------------------------------------------------


def test_a_single_member_is_chosen_among_those_of_an_engine() -> None:
    name = PAIR[1].name
    chosen = run("single", PAIR, use=name, max_new_tokens=24)
    assert as_data(chosen) == approximately(as_data(run("single", PAIR[1:], max_new_tokens=24)))
    with pytest.raises(InvalidInputError, match=r"one member; got 2 .*use="):
        run("single", PAIR)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("words", [1, 2, 3])
def test_a_fixed_number_of_words_is_algorithm_1_where_everybody_is_sure(words: int) -> None:
    for recipes, prompt in ((PAIR, PROMPTS[0]), (TRIPLE, PROMPTS[1]), (LOSSY, PROMPTS[2])):
        expected = decode(
            [reference(recipe) for recipe in recipes],
            prompt,
            Options(margin_threshold=0, max_words=words, branching_factor=1, max_new_tokens=24),
        )
        for drafting in (False, True):
            strategy = FixedWords(words)
            got = run(strategy, recipes, prompt, drafting=drafting, max_new_tokens=24)
            assert_same(got, expected, TOLERANCE)
        considered = {len(m) for each in got.rounds for m in each.margins.values()}
        assert max(considered) == words


# All of them ----------------------------------------------------------------------------------


def saying(name: str, reply: str) -> FakeBackend:
    """A member that writes one reply."""
    pieces = [*(f" {word}" for word in reply.split()), END]

    def rule(text: str) -> dict[str, float]:
        return {pieces[min(text.count(" "), len(pieces) - 1)]: 0.9, " um": 0.1}

    return FakeBackend(name, rule, [*pieces[:-1], " um"])


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMED)
def test_an_option_that_a_strategy_does_not_use_is_refused(name: str) -> None:
    strategy = find_strategy(name)
    other: dict[str, Any] = {
        "margin_threshold": 0.5,
        "max_words": 2,
        "branching_factor": 2,
        "max_word_tokens": 8,
        "max_word_letters": 8,
        "weights": (1.0, 2.0),
    }
    use = ("a",) if name == "single" else None
    fakes = [saying("a", "Yes"), saying("b", "No")]
    with AdaFuseEngine(fakes, AdaFuseConfig(use=use), strategy=strategy) as engine:
        for option, value in other.items():
            if option in strategy.options:
                given: dict[str, Any] = {option: value, "max_new_tokens": 5}
                assert engine.generate("x", **given).text
            else:
                said = f"option '{option}': strategy '{name}' does not use it; got"
                with pytest.raises(InvalidOptionError, match=said):
                    engine.generate("x", **{option: value})
                with pytest.raises(InvalidOptionError, match=said):
                    AdaFuseEngine(fakes, AdaFuseConfig(**{option: value}), strategy=strategy)


@pytest.mark.quick
@pytest.mark.parametrize("strategy", [AdaFuse(), Mixture(), Single(), FixedWords(7)])
def test_a_strategy_is_given_by_name_or_as_an_object(strategy: Strategy) -> None:
    assert AdaFuseEngine([saying("a", "Yes")], strategy=strategy).strategy is strategy
    assert find_strategy(strategy.name).name == strategy.name
    assert type(find_strategy(strategy.name)) is type(strategy)
