"""Strategies that a name imports."""

from collections.abc import Sequence
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, Candidate, InvalidOptionError
from adafuse_llm.backends import FakeBackend
from adafuse_llm.strategies import (
    AdaFuse,
    MemberState,
    PoolCandidate,
    find_strategy,
    score,
)

pytestmark = pytest.mark.quick

HERE = "tests.strategies.test_registry"


class Least(AdaFuse):
    """Words that the members find least likely."""

    name = "least"

    def scorer(self, candidate: PoolCandidate, members: Sequence[MemberState]) -> Candidate:
        usual = score(candidate, members)
        assert usual.score is not None
        return usual.model_copy(update={"score": -usual.score})


least = Least()


def text(strategy: str) -> str:
    members = [
        FakeBackend(name, lambda _, p=own: {" a": p, " b": 1 - p}, [" a", " b"])  # type: ignore[misc]
        for name, own in (("one", 0.9), ("two", 0.4))
    ]
    with AdaFuseEngine(members, strategy=strategy) as engine:
        return engine.generate("So:", max_new_tokens=1).text


@pytest.mark.parametrize("place", ["least", "Least"])
def test_the_place_of_a_strategy_imports_it(place: str) -> None:
    assert text("adafuse") == " a"
    assert text(f"{HERE}:{place}") == " b"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixtur", r"must be one of auto, adafuse, .*Did you mean 'mixture'\?"),
        (
            "no.such.module:Own",
            r"imported or created \(ModuleNotFoundError: .*PYTHONPATH",
        ),
        (f"{HERE}:Most", r"created \(AttributeError"),
        (f"{HERE}:HERE", "must be a Strategy object, or a class or function"),
        (f"{HERE}:text", r"created \(TypeError"),
        (3, "must be one of"),
    ],
)
def test_what_is_no_strategy_is_one_error(name: Any, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        find_strategy(name)
