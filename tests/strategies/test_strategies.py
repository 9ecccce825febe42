"""Strategies besides AdaFuse: what defines each, and each against a second computation."""

from typing import Any

import pytest

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidInputError, InvalidOptionError
from adafuse_llm.backends import Backend, FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.decoding.draft import MAX_DRAFT
from adafuse_llm.strategies import AdaFuse, Mixture, Single, Strategy, find_strategy
from adafuse_llm.strategies.registry import NAMED


def test_a_single_member_is_chosen_among_those_of_an_engine() -> None:
    with AdaFuseEngine([saying("a", "Yes"), saying("b", "No")], strategy="single") as pair:
        assert pair.generate("x", use="b").text == " No"
        with pytest.raises(InvalidInputError, match=r"one member; got 2 .*use="):
            pair.generate("x")


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


# The default -----------------------------------------------------------------------------------


def member(name: str, parameters: int | None, likelier: str = " a") -> FakeBackend:
    first = {" a": 0.4, " b": 0.4} | {likelier: 0.6}
    backend = FakeBackend(
        name,
        lambda text: first if text == "So:" else {END: 1.0},
        [" a", " b", "S", "o", ":"],
        is_complete=True,
    )
    backend.parameters = parameters
    return backend


@pytest.mark.quick
@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ((100, 199), "adafuse"),
        ((100, 200), "mixture"),
        ((150, 100, 300), "mixture"),
        ((100, None), "adafuse"),
        ((100,), "adafuse"),
    ],
)
def test_uneven_members_are_mixed(sizes: tuple[int | None, ...], chosen: str) -> None:
    members = [member(f"m{i}", size) for i, size in enumerate(sizes)]
    with AdaFuseEngine(members) as engine:
        assert engine.strategy.name == chosen


@pytest.mark.quick
def test_the_larger_member_has_more_say_and_one_option_brings_the_papers_rule_back() -> None:
    members = [member("large", 900, " a"), member("small", 100, " b"), member("other", 100, " b")]
    with AdaFuseEngine(members) as engine:
        mixed = engine.generate("So:")
        assert (mixed.text, mixed.strategy) == (" a", "mixture")
        assert engine.with_strategy("adafuse").generate("So:").text == " b"
        assert engine.with_strategy("adafuse").with_strategy("auto").strategy.name == "mixture"


@pytest.mark.parametrize("options", [{"max_words": 2}, {"use": ("m0", "m1")}])
def test_members_and_options_that_are_set_decide(options: dict[str, Any]) -> None:
    members = [member(f"m{i}", size) for i, size in enumerate((100, 120, 400))]
    with AdaFuseEngine(members, AdaFuseConfig(**options)) as engine:
        assert engine.strategy.name == "adafuse"


class Textless(FakeBackend):
    """A member that does not know which tokens end a word."""

    token_texts = Backend.token_texts


def test_a_member_that_does_not_know_all_tokens_is_not_mixed() -> None:
    listing, textless = member("m0", 100), Textless("m0", lambda _: {END: 1.0})
    listing.knows_distributions, textless.parameters = False, 100
    for ignorant in (listing, textless):
        with AdaFuseEngine([ignorant, member("m1", 300)]) as engine:
            assert engine.strategy.name == "adafuse"


@pytest.mark.quick
def test_without_members_auto_is_the_papers_rule() -> None:
    assert find_strategy("auto").name == "adafuse"


@pytest.mark.quick
@pytest.mark.parametrize(("strategy", "words"), [(AdaFuse(), 3 - 1 + 4), (Single(), 1)])
def test_memory_is_reserved_for_the_words_that_all_members_propose(
    strategy: Strategy, words: int
) -> None:
    config = AdaFuseConfig(max_words=3, branching_factor=4, max_word_tokens=5)
    assert strategy.max_extra_tokens(7, config) == 7 * words * 5
    assert Mixture().max_extra_tokens(7, config) == 7 * 4 * 5 + MAX_DRAFT
