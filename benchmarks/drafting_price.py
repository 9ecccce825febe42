"""Measure what drafts cost and save when a token in a pass has a price.

    python benchmarks/drafting_price.py
    python benchmarks/drafting_price.py --sleep --words 400 --output drafting_price.json

Two fake members decode together. A pass over n tokens takes 4 ms * (1 + price * (n - 1)). This time
passes on a simulated clock, so other programs on the machine change nothing. With --sleep, the
members really sleep, and the figures are wall-clock times. There are three kinds of text: the
members always agree, each chooses one word in five on its own, or they never agree. Each text is
decoded in three ways:

off       without drafts
free      with drafts, as if every token were free
measured  with drafts, and with the price that the engine measures

All ways must write the same text. Times are relative to the faster of `off` and `free`. The times
of `measured` include the passes in which the engine learns the price.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.base import NodeQuery, NodeResult
from adafuse_llm.decoding import costs

PASS_SECONDS = 0.004
PRICES = (0.0, 0.25, 0.5, 0.75, 1.0)
DISAGREEMENT = {"agree": 0.0, "mixed": 0.2, "apart": 1.0}
"""Share of words that each member chooses on its own, by kind of text."""

BRANCHES = (1, 3)
WAYS = ("off", "free", "measured")
WORDS = [f" w{number}" for number in range(200)]
REQUESTS = 3


class PricedBackend(FakeBackend):
    """A fake whose passes take a fixed time, and more for every token after the first.

    Attributes:
        tokens: number of tokens processed so far.
    """

    def __init__(
        self,
        name: str,
        rule: Callable[[str], Mapping[str, float]],
        price: float,
        spend: Callable[[float], None],
    ) -> None:
        super().__init__(name, rule, vocabulary=WORDS)
        self.tokens = 0
        self._price = price
        self._spend = spend

    def evaluate(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        results = [replace(each, passes=1) for each in super().evaluate(queries)]
        tokens = sum(result.tokens for result in results)
        self.tokens += tokens
        self._spend(PASS_SECONDS * (1 + self._price * (tokens - 1)))
        return results


class Clock:
    """A clock that advances only when somebody spends time."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def spend(self, seconds: float) -> None:
        """Advance the clock."""
        self._now += seconds


def choose_words(name: str, disagreement: float) -> Callable[[str], Mapping[str, float]]:
    """Return the rule of a member that chooses a share of the words on its own."""

    def rule(text: str) -> Mapping[str, float]:
        draw = random.Random(f"{name} {text}")
        chooser = draw if draw.random() < disagreement else random.Random(text)
        first, second = chooser.sample(WORDS, 2)
        return {first: chooser.uniform(0.5, 0.9), second: 0.1}

    return rule


def run(
    way: str, kind: str, branches: int, price: float, words: int, *, sleep: bool
) -> dict[str, Any]:
    """Decode a few texts one after the other, and return the figures."""
    clock = Clock()
    spend = time.sleep if sleep else clock.spend
    members = [
        PricedBackend(name, choose_words(name, DISAGREEMENT[kind]), price, spend)
        for name in ("a", "b")
    ]
    floor = costs.MIN_PRICE if way == "measured" else math.inf
    with (
        mock.patch.object(costs, "MIN_PRICE", floor),
        mock.patch.object(time, "perf_counter", time.perf_counter if sleep else clock),
        AdaFuseEngine(members, runtime=RuntimeConfig(drafting=way != "off")) as engine,
    ):
        started = time.perf_counter()
        texts = [
            engine.generate(
                f"Text {number}:", max_new_tokens=words // REQUESTS, branching_factor=branches
            ).text
            for number in range(REQUESTS)
        ]
        seconds = time.perf_counter() - started
        found = [cost.price for cost in engine.pass_costs.values()]
    return {
        "way": way,
        "seconds": seconds,
        "tokens": sum(member.tokens for member in members),
        "price": max(found, default=None),
        "texts": texts,
    }


def compare(kind: str, branches: int, price: float, words: int, *, sleep: bool) -> dict[str, Any]:
    """Return one row: tokens and seconds of each way."""
    runs = [run(way, kind, branches, price, words, sleep=sleep) for way in WAYS]
    if any(each["texts"] != runs[0]["texts"] for each in runs):
        raise SystemExit("a draft changed a text")
    return {
        "kind": kind,
        "branches": branches,
        "price": price,
        "found": runs[-1]["price"],
        "tokens": {each["way"]: each["tokens"] for each in runs},
        "seconds": {each["way"]: each["seconds"] for each in runs},
        "ratio": runs[-1]["seconds"] / min(each["seconds"] for each in runs[:-1]),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the figures as Markdown."""
    lines = [
        "| members | B | price | measured price | tokens: off, free, measured "
        "| seconds: off, free, measured | measured ÷ best |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        tokens = ", ".join(str(row["tokens"][way]) for way in WAYS)
        seconds = ", ".join(f"{row['seconds'][way]:.2f}" for way in WAYS)
        found = "unknown" if row["found"] is None else f"{row['found']:.2f}"
        lines.append(
            f"| {row['kind']} | {row['branches']} | {row['price']:g} | {found} | {tokens} "
            f"| {seconds} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--words", type=int, default=300, help="words that each way writes")
    parser.add_argument("--sleep", action="store_true", help="measure wall-clock times")
    parser.add_argument("--output", type=Path, help="write the figures to this file, as JSON")
    arguments = parser.parse_args()
    rows = [
        compare(kind, branches, price, arguments.words, sleep=arguments.sleep)
        for kind in DISAGREEMENT
        for branches in BRANCHES
        for price in PRICES
    ]
    print(table(rows))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
