"""Memory, measured in a process of its own: ``python -m benchmarks.speed.memory WHAT NUMBERS``.

peak PROMPT REQUESTS    bytes that requests at once take at their peak
growth FIRST LAST       percent that resident memory grows from request FIRST to LAST
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.002
TOGETHER = 10
"""Requests at a time while growth is measured."""
KEPT = 16 * 2**20
"""Bytes kept of earlier prompts then."""


def in_process(what: str, *numbers: int) -> float:
    """What a fresh process measures."""
    command = [sys.executable, "-m", "benchmarks.speed.memory", what, *map(str, numbers)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def peak(prompt: int, requests: int) -> float:
    """Bytes that so many requests at once take at their peak, three members."""
    from benchmarks.speed.members import embedded, make_engine, prompt_of

    engine = make_engine(embedded(), max_requests=requests, max_new_tokens=16)
    engine.generate(prompt_of(20))
    texts = [prompt_of(prompt, seed) for seed in range(requests)]
    return _peak(lambda: engine.generate_batch(texts))


def growth(first: int, last: int) -> float:
    """Percent by which resident memory grows from request `first` to request `last`, every one
    with a prompt of its own. What is kept of earlier prompts is full by then, and what the
    allocator holds of freed memory is not counted where it can be told to give that back.
    """
    from benchmarks.speed.members import embedded, make_engine, prompt_of

    engine = make_engine(embedded(prefix_cache_bytes=KEPT), max_new_tokens=4)
    levels: list[int] = []
    texts = [prompt_of(20 + seed % 30, seed) for seed in range(last)]
    for done in range(0, last, TOGETHER):
        engine.generate_batch(texts[done : done + TOGETHER])
        if done + TOGETHER in (first, last):
            gc.collect()
            _give_back_free_memory()
            levels.append(psutil.Process().memory_info().rss)
    return 100 * (levels[-1] / levels[0] - 1)


def _give_back_free_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def _peak(run: Callable[[], object]) -> int:
    """By how many bytes resident memory rises at most while something runs."""
    gc.collect()
    process = psutil.Process()
    before: int = process.memory_info().rss
    most = before
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(POLL_SECONDS):
            most = max(most, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    over.set()
    watcher.join()
    return most - before


def row_bytes(config: object) -> int:
    """Bytes of one token's keys and values in float32."""
    heads = getattr(config, "num_key_value_heads", 0)
    width = getattr(config, "hidden_size", 0) // getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or width
    return int(getattr(config, "num_hidden_layers", 0) * 2 * heads * width * 4)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    what, *numbers = sys.argv[1:]
    print({"peak": peak, "growth": growth}[what](*map(int, numbers)))
