"""Time small models with one and with two threads, on an idle and on a busy machine.

    python benchmarks/threads.py

The models are random Llama models in float32. The benchmark times passes over 1 and 8 new tokens
after 200 cached tokens, with one and two threads in turns. It does this first alone, and then while
another process keeps one core busy. A ratio below 1 means that two threads are faster than one. The
ratio of the fastest passes shows what two threads gain while nothing else runs. The command
`adafuse` uses one thread for members below `adafuse_llm.cli.common.SMALL`.

The run takes about two minutes on an idle machine. Other programs change the result, so the load
average of the machine is printed, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

SIZES = ((128, 4), (256, 6), (512, 8), (1024, 16))
"""Hidden size and number of layers of each model."""

CACHED = 200
WIDTHS = (1, 8)
THREADS = (1, 2)
SECONDS = 5.0
"""How long a cell is measured."""

TURN = 0.2
"""How long a number of threads is measured before it is the turn of the other, in seconds."""


def main() -> None:
    """Measure and print the ratios."""
    torch.manual_seed(0)
    cores = os.cpu_count() or 1
    print(f"torch {torch.__version__}, {cores} cores, load average {os.getloadavg()[0]:.1f}")
    print("mean milliseconds of a pass with 1 thread (2 threads / 1 thread: mean, fastest pass)")
    columns = [f"{width} new, {name}" for name in ("alone", "neighbor") for width in WIDTHS]
    print(f"{'parameters':>12}", *(f"{column:>22}" for column in columns))
    for hidden, layers in SIZES:
        model = make(hidden, layers)
        cells = []
        for neighbors in (0, 1):
            with busy(neighbors):
                cells += [cell(measure(model, width)) for width in WIDTHS]
        print(f"{model.num_parameters() / 1e6:>10.1f} M", *(f"{each:>22}" for each in cells))
    print(f"load average {os.getloadavg()[0]:.1f}")


def make(hidden: int, layers: int) -> LlamaForCausalLM:
    """Return a random Llama model."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).eval()


def measure(model: LlamaForCausalLM, width: int) -> dict[int, list[float]]:
    """Return the seconds of each pass over `width` new tokens, by number of threads."""
    times: dict[int, list[float]] = {threads: [] for threads in THREADS}
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.zeros(1, CACHED, dtype=torch.long), past_key_values=cache)
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            for threads in THREADS:
                torch.set_num_threads(threads)
                run(model, cache, width)  # the threads start
                times[threads].append(run(model, cache, width))
                turn = time.perf_counter() + TURN
                while time.perf_counter() < turn:
                    times[threads].append(run(model, cache, width))
    return times


def run(model: LlamaForCausalLM, cache: DynamicCache, width: int) -> float:
    """Return the seconds of one pass, and drop its tokens from the cache again."""
    start = time.perf_counter()
    model(torch.zeros(1, width, dtype=torch.long), past_key_values=cache)
    seconds = time.perf_counter() - start
    cache.crop(-width)
    return seconds


def cell(times: dict[int, list[float]]) -> str:
    """Format the mean time with one thread, and the ratios of the mean and of the minimum."""
    one, two = times[1], times[2]
    return f"{1000 * fmean(one):.1f} ({fmean(two) / fmean(one):.2f}, {min(two) / min(one):.2f})"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep cores busy with other processes during the ``with`` block."""
    code = "while True: pass"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
