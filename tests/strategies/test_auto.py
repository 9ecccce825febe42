"""The default strategy, which is chosen for the members."""

from __future__ import annotations

from typing import Any

import pytest

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends import Backend, FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.strategies import find_strategy

pytestmark = pytest.mark.quick


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


def test_a_member_of_which_only_likely_tokens_are_known_is_not_mixed() -> None:
    listing = member("m0", 100)
    listing.full = False
    with AdaFuseEngine([listing, member("m1", 300)]) as engine:
        assert engine.strategy.name == "adafuse"


class Textless(FakeBackend):
    """A member that knows whole distributions, but not which tokens end a word."""

    token_texts = Backend.token_texts


def test_a_member_without_the_texts_of_its_tokens_is_not_mixed() -> None:
    members = [Textless("m0", lambda _: {END: 1.0}), member("m1", 300)]
    members[0].parameters = 100
    with AdaFuseEngine(members) as engine:
        assert engine.strategy.name == "adafuse"


def test_without_members_auto_is_the_papers_rule() -> None:
    assert find_strategy("auto").name == "adafuse"
