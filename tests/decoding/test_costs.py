"""What passes cost is measured, and drafts are worth their price."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, Generation, RuntimeConfig
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.base import NodeQuery, NodeResult
from adafuse_llm.decoding.costs import (
    MAX_AGE,
    MAX_TOKENS,
    MIN_PASSES,
    MIN_PRICE,
    UPDATE_INTERVAL,
    PassTimes,
)
from tests.support.compare import as_data

pytestmark = pytest.mark.quick

WORDS = [f" w{number}" for number in range(200)]
PASS_SECONDS = 0.004

Rule = Callable[[str], dict[str, float]]


def measured(passes: Iterable[tuple[int, int, float]]) -> PassTimes:
    """Pass times after passes of (requests, tokens, seconds)."""
    times = PassTimes()
    for requests, tokens, seconds in passes:
        times.learn(requests, tokens, seconds)
    return times


def linear(price: float, sizes: Sequence[int], requests: int = 1) -> list[tuple[int, int, float]]:
    """Many passes of these sizes, at a price."""
    return [(requests, n, PASS_SECONDS * (1 + price * (n - 1))) for n in sizes] * 20


@pytest.mark.parametrize("price", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("sizes", [(1, 2), (1, 3, 5, 17), (4, 6)])
def test_the_price_is_the_share_of_a_pass_that_another_token_costs(
    price: float, sizes: tuple[int, ...]
) -> None:
    times = measured(linear(price, sizes))
    assert times.cost is not None
    assert times.cost.price == pytest.approx(price)
    assert times.cost.seconds == pytest.approx(PASS_SECONDS)
    assert times.draft_price == pytest.approx(price if price >= MIN_PRICE else 0.0)


@pytest.mark.parametrize(("price", "found"), [(0.0, 0.0), (0.2, 0.2), (1.0, 1.0)])
def test_noise_and_outliers_change_the_price_little(price: float, found: float) -> None:
    for seed in range(30):
        chance = random.Random(seed)
        times = PassTimes()
        for _ in range(400):
            tokens = chance.choice((1, 1, 1, 2, 4, 7))
            noise = 1 + chance.expovariate(3) + (50 if chance.random() < 0.1 else 0)
            times.learn(1, tokens, noise * PASS_SECONDS * (1 + price * (tokens - 1)))
        assert times.cost is not None
        assert times.cost.price == pytest.approx(found, abs=0.2)


def test_batches_of_equal_size_tell_the_price_if_no_request_runs_alone() -> None:
    passes = [
        (requests, tokens, 0.002 * requests + PASS_SECONDS * (1 + 0.75 * (tokens - 1)))
        for tokens in (8, 10, 13)
        for requests in (3, 8)
    ]
    times = measured(passes * 20)
    assert times.cost is not None
    assert times.cost.price * times.cost.seconds == pytest.approx(0.75 * PASS_SECONDS)


def test_a_request_alone_counts_more_than_batches() -> None:
    times = measured([*linear(0.0, (4, 9), requests=4), *linear(1.0, (1, 3))])
    assert times.draft_price == pytest.approx(1.0)


@pytest.mark.parametrize(
    "passes",
    [
        [],
        linear(1.0, (1,)),
        linear(1.0, (MAX_TOKENS + 1, 500)),
        [(1, 1, 0.004), (1, 4, 0.016)] * (MIN_PASSES - 1),
        [(1, 0, 0.004)] * 50,
    ],
    ids=["none", "one size", "prompts", "too few", "no tokens"],
)
def test_without_enough_passes_there_is_no_price(passes: list[tuple[int, int, float]]) -> None:
    times = measured(passes)
    assert times.cost is None
    assert times.draft_price == 0.0


def test_passes_shorter_than_half_a_millisecond_have_no_price() -> None:
    times = measured((1, n, 0.0004 * n) for _ in range(20) for n in (1, 4))
    assert times.cost is not None
    assert times.cost.price == 0.0


def test_the_price_follows_changes_and_old_passes_are_forgotten() -> None:
    times = measured([*linear(1.0, (1, 4)), *linear(0.1, (1, 4))])
    assert times.draft_price == 0.0
    times = measured([*linear(1.0, (1, 4)), *[(1, 1, 0.004)] * (MAX_AGE + UPDATE_INTERVAL)])
    assert times.cost is None
    assert times.draft_price == 0.0


class Priced(FakeBackend):
    """A fake whose passes take seconds of a clock that only it moves.

    Attributes:
        sizes: tokens of every pass.
    """

    def __init__(self, name: str, rule: Rule, clock: list[float], price: float) -> None:
        super().__init__(name, rule, vocabulary=WORDS)
        self.sizes: list[int] = []
        self._clock = clock
        self._price = price

    def evaluate(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        results = [replace(each, passes=1) for each in super().evaluate(queries)]
        tokens = sum(result.tokens for result in results)
        self._clock[0] += PASS_SECONDS * (1 + self._price * (tokens - 1))
        self.sizes.append(tokens)
        return results


def partly(name: str) -> Rule:
    """Words of which members choose a fifth on their own, with repetitions."""

    def rule(text: str) -> dict[str, float]:
        own = random.Random(f"{name} {text}")
        common = random.Random(text.count(" w") % 12)
        first, second = (own if own.random() < 0.2 else common).sample(WORDS, 2)
        return {first: 0.75, second: 0.1}

    return rule


def decode(
    monkeypatch: pytest.MonkeyPatch, price: float, *, drafting: bool = True, branches: int = 1
) -> tuple[list[Generation], list[Priced], AdaFuseEngine, float]:
    """Decode two texts; return them, the members, the engine and the seconds of the clock."""
    clock = [0.0]
    monkeypatch.setattr("adafuse_llm.runtime.scheduler.time.perf_counter", lambda: clock[0])
    members = [Priced(name, partly(name), clock, price) for name in "ab"]
    with AdaFuseEngine(members, runtime=RuntimeConfig(drafting=drafting)) as engine:
        texts = [
            engine.generate(prompt, max_new_tokens=150, branching_factor=branches)
            for prompt in ("One:", "Two:")
        ]
    return texts, members, engine, clock[0]


def data(generations: Sequence[Generation]) -> list[Any]:
    return [as_data(each) for each in generations]


@pytest.mark.parametrize("branches", [1, 3])
def test_members_with_expensive_tokens_process_no_more_of_them_than_without_drafts(
    monkeypatch: pytest.MonkeyPatch, branches: int
) -> None:
    plain, needed, _, without = decode(monkeypatch, 1.0, drafting=False, branches=branches)
    drafted, members, engine, seconds = decode(monkeypatch, 1.0, branches=branches)
    assert data(drafted) == data(plain)
    assert {round(cost.price, 6) for cost in engine.pass_costs.values()} == {1.0}
    assert set(engine.pass_costs) == {"a", "b"}
    assert sum(sum(m.sizes) for m in members) <= sum(sum(m.sizes) for m in needed)
    assert seconds <= without
    with monkeypatch.context() as patch:
        patch.setattr("adafuse_llm.decoding.costs.MIN_PRICE", float("inf"))
        _, wasteful, _, longer = decode(monkeypatch, 1.0, branches=branches)
    assert sum(sum(m.sizes) for m in wasteful) > sum(sum(m.sizes) for m in members)
    assert longer > seconds


def test_members_with_cheap_tokens_draft_as_if_they_were_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sizes(price: float) -> list[list[int]]:
        return [member.sizes for member in decode(monkeypatch, price)[1]]

    assert sizes(0.25) == sizes(0.0)


def test_passes_that_read_a_prompt_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("adafuse_llm.runtime.scheduler.time.perf_counter", lambda: clock[0])
    with AdaFuseEngine([Priced("a", partly("a"), clock, 1.0)]) as engine:
        for words in (2, 4) * 2 * MIN_PASSES:
            engine.score("One:", ["".join(WORDS[:words])])
        assert engine.pass_costs == {}


def test_expensive_tokens_are_not_drafted_with_alternatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unsure(text: str) -> dict[str, float]:
        count = text.count(" w")
        return {WORDS[count % 200]: 0.5, WORDS[(count + 1) % 200]: 0.4}

    monkeypatch.setattr(f"{__name__}.partly", lambda name: unsure)
    plain, needed, _, without = decode(monkeypatch, 0.8, drafting=False, branches=2)
    drafted, members, _, seconds = decode(monkeypatch, 0.8, branches=2)
    assert data(drafted) == data(plain)
    assert seconds <= 1.01 * without
    assert sum(sum(m.sizes) for m in members) <= 1.01 * sum(sum(m.sizes) for m in needed)
