"""Measure whether members on one CPU run faster in turns or in parallel on shares of the cores.

    python benchmarks/members_side_by_side.py
    python benchmarks/members_side_by_side.py --repeats 21 --output side_by_side.json

In a step, each embedded member runs a forward pass over the same number of tokens. The step ends
when the last member has finished. A step over one token is like plain decoding, and a step over
eight tokens is like a small batch or a tree.

turns       one member after the other, each with all threads
turns, 1    one member after the other, each with a single thread
at once     all members in parallel, each with a Python thread and an equal share of the threads

The three ways alternate, so that other load on the machine affects all of them. Each round of all
three ways gives one ratio, and the benchmark reports the median of these ratios. Threads that share
an operation wait for each other. On a busy machine, `turns` therefore suffers most, and the ratios
depend on the load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends.huggingface import HuggingFaceBackend

WAYS = ("turns", "turns, 1", "at once")
TOKENS = (1, 8)
PROMPT_TOKENS = 256
STEPS = 5
"""Number of steps in each measurement."""


@torch.inference_mode()
def passes(model: Any, tokens: int) -> Callable[[], None]:
    """Return a function that runs a forward pass over [1, tokens] after a cached prompt."""
    cache = model(torch.full((1, PROMPT_TOKENS), 5), use_cache=True).past_key_values
    ids = torch.full((1, tokens), 7)

    @torch.inference_mode()
    def run() -> None:
        model(ids, past_key_values=cache, use_cache=True)
        cache.crop(-tokens)

    return run


def in_turns(runs: Sequence[Callable[[], None]]) -> float:
    """Time a step with one member after the other; return seconds."""
    started = time.perf_counter()
    for _ in range(STEPS):
        for run in runs:
            run()
    return (time.perf_counter() - started) / STEPS


def at_once(runs: Sequence[Callable[[], None]], pools: Sequence[ThreadPoolExecutor]) -> float:
    """Time a step with each member on its own thread; return seconds."""
    started = time.perf_counter()
    for _ in range(STEPS):
        for step in [pool.submit(run) for pool, run in zip(pools, runs, strict=True)]:
            step.result()
    return (time.perf_counter() - started) / STEPS


def measure(models: Sequence[Any], threads: int, repeats: int) -> list[dict[str, Any]]:
    """Return rows with the median time of a step and its ratio to `turns`, by tokens and way."""
    share = max(1, threads // len(models))
    pools = [ThreadPoolExecutor(1) for _ in models]
    for pool in pools:  # torch keeps a separate setting for each calling thread
        pool.submit(torch.set_num_threads, share).result()

    def step(way: str, runs: Sequence[Callable[[], None]]) -> float:
        torch.set_num_threads(threads if way == "turns" else 1)
        return at_once(runs, pools) if way == "at once" else in_turns(runs)

    rows = []
    for tokens in TOKENS:
        runs = [passes(model, tokens) for model in models]
        times = [{way: step(way, runs) for way in WAYS} for _ in range(1 + repeats)][1:]  # warm-up
        for way in WAYS:
            milliseconds = 1000 * statistics.median(each[way] for each in times)
            ratio = statistics.median(each[way] / each["turns"] for each in times)
            rows.append({"tokens": tokens, "way": way, "ms": milliseconds, "ratio": ratio})
    for pool in pools:
        pool.shutdown()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the figures as Markdown."""
    lines = ["| tokens | way | ms per step | ÷ turns |", "|---:|---|---:|---:|"]
    lines += [f"| {r['tokens']} | {r['way']} | {r['ms']:.2f} | {r['ratio']:.2f} |" for r in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, default=11, help="number of measurements, at least 5"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="write the figures to this file, as JSON")
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("--repeats must be at least 5")
    with AdaFuseEngine.from_embedded() as engine:
        backends = [each for each in engine.backends if isinstance(each, HuggingFaceBackend)]
    rows = measure([each.model for each in backends], arguments.threads, arguments.repeats)
    print(table(rows))
    if arguments.output:
        machine = {"cpu": platform.processor(), "torch": torch.__version__}
        report = {**machine, "threads": arguments.threads, "repeats": arguments.repeats}
        arguments.output.write_text(json.dumps({**report, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
