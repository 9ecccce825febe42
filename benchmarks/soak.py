"""Send many different requests to shared engines, and check that nothing breaks or grows.

    python -m benchmarks.soak --minutes 30

Worker threads send random requests for the embedded members until the time is over: as a prompt or
as messages, with several strategies, through `generate`, `stream`, `generate_batch` and
`agenerate`. About one request in twenty is stopped early: by its caller, by a timeout, or by
closing its stream. About one in twenty is faulty: its input is wrong, or a member fails during its
decode. From time to time a worker closes an engine that has running requests.

The benchmark first answers every request alone. Each later response must have the same text, and a
response that is stopped early must have the beginning of this text. At the end, all engines are
closed. The benchmark prints the numbers of requests by outcome, of texts that differ, of unexpected
errors, and the threads and the resident memory at the start and at the end. It exits with 1 if a
text differs, an error is unexpected, or a thread is left.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from adafuse_llm import (
    AdaFuseEngine,
    EngineClosedError,
    Generation,
    InvalidInputError,
    MemberError,
    RequestTimeoutError,
    RuntimeConfig,
)
from adafuse_llm.backends import Backend, Query, QueryResult
from adafuse_llm.embedded import handbook_questions

STRATEGIES = ("adafuse", "mixture", "single")
QUESTIONS = 8
WORKERS = 6
STOPPED = FAULTY = 0.05
"""Share of the requests that are stopped early, and share of the faulty requests."""
EVENTS = 40
"""Average number of requests of a worker until it closes an engine."""
OPTIONS: dict[str, Any] = {"max_new_tokens": 24}


def failing(inner: Backend, dice: random.Random) -> Backend:
    """Return a member that fails in about every second pass."""

    def evaluate(queries: Sequence[Query]) -> list[QueryResult]:
        if dice.random() < 0.5:
            raise RuntimeError("a planned failure")
        return inner.evaluate(queries)

    member = copy.copy(inner)
    member.evaluate = evaluate  # type: ignore[method-assign]
    return member


@dataclass(frozen=True)
class Item:
    """A request and the text of its response."""

    strategy: str
    request: dict[str, Any]
    text: str


@dataclass
class Tally:
    """Results of the soak so far. Any thread can add to it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str) -> None:
        """Count a request."""
        with self._lock:
            self.outcomes[outcome] += 1

    def compare(self, item: Item, generation: Generation) -> None:
        """Compare a response with the text that the same request had alone."""
        whole = generation.finish_reason != "cancelled"
        if generation.text == item.text or (not whole and item.text.startswith(generation.text)):
            self.add("whole" if whole else "cancelled")
        else:
            self.different.append(f"{item.strategy} {item.request}: {generation.text!r}")


class Soak:
    """The engines, the requests and the tally of one run."""

    def __init__(self, seed: int) -> None:
        self.backends = AdaFuseEngine.from_embedded().backends
        self.seed = seed
        self.tally = Tally()
        self._open()
        questions = [each.question for each in handbook_questions()[:QUESTIONS]]
        forms: list[dict[str, Any]] = [
            *({"prompt": f"Question: {question}\nAnswer:"} for question in questions),
            *({"messages": [{"role": "user", "content": question}]} for question in questions),
        ]
        self.items = [
            Item(name, form, self.engines[name].generate(**form, **self.options(name)).text)
            for name in STRATEGIES
            for form in forms
        ]

    def options(self, strategy: str) -> dict[str, Any]:
        """Return the options of requests with a strategy."""
        return {**OPTIONS, "use": self.backends[0].name} if strategy == "single" else OPTIONS

    def run(self, minutes: float) -> None:
        """Let workers send requests until the time is over, and replace all engines."""
        end = time.monotonic() + 60 * minutes
        with ThreadPoolExecutor(WORKERS) as pool:
            workers = [pool.submit(self._work, number, end) for number in range(WORKERS)]
            for worker in workers:
                worker.result()
        for engine in (*self.engines.values(), *self.failing.values()):
            engine.close(timeout=60)
        self._open()

    def _open(self) -> None:
        self.engines = {name: self._engine(name) for name in STRATEGIES}
        first, *others = self.backends
        members = [failing(first, random.Random(self.seed)), *others]
        self.failing = {name: AdaFuseEngine(members, strategy=name) for name in STRATEGIES[:2]}

    def _engine(self, strategy: str) -> AdaFuseEngine:
        return AdaFuseEngine(
            self.backends, strategy=strategy, runtime=RuntimeConfig(max_requests=4)
        )

    def _work(self, number: int, end: float) -> None:
        dice = random.Random(1000 * self.seed + number)
        while time.monotonic() < end:
            item = dice.choice(self.items)
            kind = dice.random()
            try:
                if dice.random() < 1 / EVENTS:
                    self._close(item)
                elif kind < FAULTY:
                    self._send_faulty(item, dice)
                elif kind < FAULTY + STOPPED:
                    self._stop(item, dice)
                else:
                    self._send(item, dice)
            except Exception as error:  # the soak continues and reports the error
                self.tally.unexpected.append(f"{type(error).__name__}: {error}"[:300])

    def _send(self, item: Item, dice: random.Random) -> None:
        engine, options = self.engines[item.strategy], self.options(item.strategy)
        how = dice.choice(("generate", "stream", "batch", "asynchronous"))
        if how == "generate":
            self.tally.compare(item, engine.generate(**item.request, **options))
        elif how == "stream":
            events = list(engine.stream(**item.request, **options))
            last = events[-1].generation
            assert last is not None
            assert "".join(event.text for event in events) == last.text
            self.tally.compare(item, last)
        elif how == "asynchronous":
            self.tally.compare(item, asyncio.run(engine.agenerate(**item.request, **options)))
        else:
            self._send_batch(item, dice)

    def _send_batch(self, item: Item, dice: random.Random) -> None:
        (form,) = item.request
        alike = [i for i in self.items if i.strategy == item.strategy and form in i.request]
        batch = dice.sample(alike, 3)
        inputs: dict[str, Any] = {
            "prompts" if form == "prompt" else form: [each.request[form] for each in batch]
        }
        engine, options = self.engines[item.strategy], self.options(item.strategy)
        for each, generation in zip(batch, engine.generate_batch(**inputs, **options), strict=True):
            self.tally.compare(each, generation)

    def _stop(self, item: Item, dice: random.Random) -> None:
        engine, options = self.engines[item.strategy], self.options(item.strategy)
        how = dice.choice(("cancel", "timeout", "close"))
        if how == "cancel":
            cancel = threading.Event()
            timer = threading.Timer(dice.uniform(0, 0.3), cancel.set)
            timer.start()
            self.tally.compare(item, engine.generate(**item.request, **options, cancel=cancel))
            timer.cancel()
            timer.join()
        elif how == "timeout":
            try:
                timeout = dice.uniform(0.01, 0.3)
                self.tally.compare(
                    item, engine.generate(**item.request, **options, timeout=timeout)
                )
            except RequestTimeoutError:
                self.tally.add("late")
        else:
            stream = engine.stream(**item.request, **options)
            text = next(stream).text
            stream.close()
            assert item.text.startswith(text)
            self.tally.add("stream closed")

    def _send_faulty(self, item: Item, dice: random.Random) -> None:
        options = self.options(item.strategy)
        if item.strategy in self.failing and dice.random() < 0.7:
            engine = self.failing[item.strategy]
            try:
                self.tally.compare(item, engine.generate(**item.request, **options))
            except MemberError:
                self.tally.add("member failed")
            return
        bad: dict[str, Any] = dice.choice(
            ({"prompt": ""}, {"messages": []}, {"prompt": "x", "timeout": -1}, {"prompt": 5})
        )
        try:
            self.engines[item.strategy].generate(**bad)
        except InvalidInputError:
            self.tally.add("bad input")

    def _close(self, item: Item) -> None:
        """Close an engine while it decodes. It shares its members with the other engines."""
        engine = self._engine(item.strategy)
        stream = engine.stream(**item.request, **self.options(item.strategy))
        with suppress(EngineClosedError):
            next(stream)
            engine.close()
            list(stream)
        engine.close()
        self.tally.add("engine closed")


def resources() -> dict[str, int]:
    """Return the number of threads and the resident memory of this process."""
    gc.collect()
    process = psutil.Process()
    return {
        "python_threads": threading.active_count(),
        "threads": process.num_threads(),
        "resident_mb": process.memory_info().rss // 2**20,
    }


def measure(minutes: float, seed: int) -> dict[str, Any]:
    """Run the soak, and return what it prints."""
    soak = Soak(seed)
    soak.run(min(minutes / 5, 1.0))  # fills caches, such as the rows of finished requests
    start = resources()
    soak.run(minutes)
    tally = soak.tally
    return {
        "minutes": minutes,
        "requests": sum(tally.outcomes.values()) + len(tally.different) + len(tally.unexpected),
        "outcomes": dict(tally.outcomes.most_common()),
        "different_texts": len(tally.different),
        "unexpected_errors": len(tally.unexpected),
        "examples": [*tally.different[:5], *tally.unexpected[:5]],
        "start": start,
        "end": resources(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak, and print its results as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    found = measure(given.minutes, given.seed)
    print(json.dumps(found, indent=2, ensure_ascii=False))
    left = found["end"]["python_threads"] - found["start"]["python_threads"]
    return int(bool(found["different_texts"] or found["unexpected_errors"] or left > 0))


if __name__ == "__main__":
    sys.exit(main())
