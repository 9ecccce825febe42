"""Measure memory in a separate process: ``python -m benchmarks.speed.memory WHAT ARGUMENTS``.

peak PROMPT REQUESTS        peak bytes of concurrent requests
growth FIRST LAST           growth of resident memory from request FIRST to LAST, in percent
first_span MEMBERS PROMPT   peak bytes of a request until its first span
prefill MEMBERS PROMPT      peak bytes of the members' own prefill, one member after the other
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
BATCH = 10
"""Number of requests in a batch of the growth measurement."""
PREFIX_CACHE_BYTES = 16 * 2**20
"""Size of the prefix cache in the growth measurement."""


def in_process(what: str, *arguments: int | str) -> float:
    """Measure in a new process and return the result."""
    command = [sys.executable, "-m", "benchmarks.speed.memory", what, *map(str, arguments)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def peak(prompt: int, requests: int) -> float:
    """Return the peak memory of concurrent requests with three members, in bytes."""
    from benchmarks.speed.members import embedded, make_engine, prompt_of

    engine = make_engine(embedded(), max_requests=requests, max_new_tokens=16)
    engine.generate(prompt_of(20))
    texts = [prompt_of(prompt, seed) for seed in range(requests)]
    return _peak(lambda: engine.generate_batch(texts))


def first_span(name: str, prompt: int) -> float:
    """Return the peak memory of a request until its first span, in bytes."""
    from benchmarks.speed import first_words
    from benchmarks.speed.members import chosen_members, make_engine, prompt_of

    engine = make_engine(chosen_members(name))
    engine.generate(prompt_of(20), max_new_tokens=4)
    text = prompt_of(prompt)
    return _peak(lambda: first_words.first_span(engine, text))


def prefill(name: str, prompt: int) -> float:
    """Return the peak memory of the members' own prefill, one member after the other, in bytes.

    The rows of each member are dropped when the next member begins.
    """
    from benchmarks.speed import first_words
    from benchmarks.speed.members import chosen_members, prompt_of

    members = chosen_members(name)
    none: dict[str, list[int]] = {member.name: [] for member in members}
    short, long = (
        {member.name: member.encode(prompt_of(length)) for member in members}
        for length in (20, prompt)
    )
    first_words.prefill(members, short, none)
    return _peak(lambda: first_words.prefill(members, long, none))


def growth(first: int, last: int) -> float:
    """Return the growth of resident memory from request `first` to request `last`, in percent.

    Each request has its own prompt. The prefix cache is full at request `first`. With glibc, the
    result excludes memory that is free but that the allocator still holds.
    """
    from benchmarks.speed.members import embedded, make_engine, prompt_of

    engine = make_engine(embedded(prefix_cache_bytes=PREFIX_CACHE_BYTES), max_new_tokens=4)
    levels: list[int] = []
    texts = [prompt_of(20 + seed % 30, seed) for seed in range(last)]
    for done in range(0, last, BATCH):
        engine.generate_batch(texts[done : done + BATCH])
        if done + BATCH in (first, last):
            gc.collect()
            _trim_heap()
            levels.append(psutil.Process().memory_info().rss)
    return 100 * (levels[-1] / levels[0] - 1)


def _trim_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def _peak(run: Callable[[], object]) -> int:
    """Return the largest rise of resident memory during a run, in bytes."""
    gc.collect()
    process = psutil.Process()
    before: int = process.memory_info().rss
    highest = before
    over = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(POLL_SECONDS):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    over.set()
    watcher.join()
    return highest - before


def row_bytes(config: object) -> int:
    """Return the number of bytes of one token's keys and values in float32."""
    heads = getattr(config, "num_key_value_heads", 0)
    width = getattr(config, "hidden_size", 0) // getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or width
    return int(getattr(config, "num_hidden_layers", 0) * 2 * heads * width * 4)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    measurements: dict[str, Callable[..., float]] = {
        "peak": peak,
        "growth": growth,
        "first_span": first_span,
        "prefill": prefill,
    }
    values = [int(each) if each.isdigit() else each for each in arguments]
    print(measurements[what](*values))
