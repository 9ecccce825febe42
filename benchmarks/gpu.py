"""Measure the speed of an ensemble of an 8B and a 7B member on a GPU.

    python -m benchmarks.gpu                  # needs a CUDA device with about 40 GB
    python -m benchmarks.gpu --tiny           # the same with toy members, on any device

The members have the shapes of Llama-3.1-8B and Mistral-7B v0.3 and random weights in bfloat16. Two
members with different weights hardly ever agree, and two with the same weights always do. Trained
members are in between. The benchmark compares the engine's time with that of the members' own
``generate()``, and with the time that the device needs to read the weights once for each token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import transformers

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.embedded import member_paths
from benchmarks.speed.measure import Line, machine, table
from benchmarks.speed.suites import PASSAGE

BOTH: Final[dict[str, Any]] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 32_768,
}
VOCABULARIES: Final = {"Llama": 128_256, "Mistral": 32_768}
TINY: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
}
AT_ONCE: Final = 16
"""Concurrent requests in the measurement of throughput."""


def make_member(kind: str, seed: int, device: torch.device, *, tiny: bool) -> HuggingFaceBackend:
    """Make a member with random weights and the tokenizer of an embedded member."""
    sizes = {**BOTH, "vocab_size": VOCABULARIES[kind], **(TINY if tiny else {})}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(seed)
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
            model.lm_head.bias = torch.nn.Parameter(torch.full((sizes["vocab_size"],), -1e4))
    finally:
        torch.set_default_dtype(previous_dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(member_paths()[seed])
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    with torch.no_grad():
        for token, piece in enumerate(pieces):  # so that it writes words of a few tokens
            if piece.strip("Ġ▁").isalpha():
                model.lm_head.bias[token] = 1.0 if piece[0] in "Ġ▁" else 0.0
    return HuggingFaceBackend(model, tokenizer, kind.lower(), prefix_cache_bytes=0)


def bandwidth(device: torch.device, size: int) -> float:
    """Measure how many bytes per second a copy of `size` bytes reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(20):
        _synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / statistics.median(seconds[5:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weight_bytes(model: Any) -> int:
    """Count the bytes of the weights that a pass reads: all except the input embeddings."""
    embeddings = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not embeddings)


@torch.inference_mode()
def run_generate(backend: Any, prompt: str, new: int, **options: Any) -> None:
    """Run the greedy ``generate()`` of a member for exactly `new` tokens."""
    ids = torch.tensor([backend.codec.encode_prompt(prompt)], device=backend.model.device)
    sizes = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0, "do_sample": False}
    backend.model.generate(ids, attention_mask=torch.ones_like(ids), **sizes, **options).tolist()


def compare(
    pair: Sequence[HuggingFaceBackend],
    name: str,
    prompt: str,
    args: argparse.Namespace,
    rate: float,
) -> Iterator[Line]:
    """Compare ensembles of a pair with ``generate()`` and with the limit of the memory.

    Args:
        pair: the members.
        name: name of the pair.
        prompt: the prompt.
        args: length of the responses, and number of runs.
        rate: bytes per second of the device's memory.
    """
    new = args.response
    with AdaFuseEngine(pair, strategy="adafuse") as engine:

        def ask(branches: int, requests: int = 1) -> None:
            options = {"max_new_tokens": new, "branching_factor": branches}
            engine.generate_batch([prompt] * requests, **options)

        systems: dict[str, Callable[[], object]] = {
            "generate()": lambda: [run_generate(each, prompt, new) for each in pair],
            "generate(), static cache": lambda: [
                run_generate(each, prompt, new, cache_implementation="static") for each in pair
            ],
            "engine, B = 1": partial(ask, 1),
            "engine, B = 3": partial(ask, 3),
            f"{AT_ONCE} at once": partial(ask, 1, AT_ONCE),
        }
        seconds: Mapping[str, list[float]] = {system: [] for system in systems}
        for _ in range(args.repeats + 1):
            for system, run in systems.items():
                start = time.perf_counter()
                run()
                seconds[system].append(time.perf_counter() - start)
        runs = {system: found[1:] for system, found in seconds.items()}  # the first run warms up
        limit = new * sum(weight_bytes(each.model) for each in pair) / rate
        for system in list(systems)[2:4]:
            for base in list(systems)[:2]:
                each = [a / b for a, b in zip(runs[system], runs[base], strict=True)]
                yield Line(f"{name}: time / sum of {base}", system, each)
            each = [value / limit for value in runs[system]]
            yield Line(f"{name}: time / least time to read the weights", system, each)
        pairs = zip(runs["engine, B = 1"], runs[f"{AT_ONCE} at once"], strict=True)
        each = [AT_ONCE * one / many for one, many in pairs]
        yield Line(f"{name}: {AT_ONCE} requests at once, throughput / one", "engine, B = 1", each)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Measure the ensemble on a GPU."
    )
    parser.add_argument("--tiny", action="store_true", help="use toy members, on any device")
    parser.add_argument("--prompts", type=int, nargs="+", default=[5, 20], metavar="N",
                        help="repetitions of a passage in the prompts")  # fmt: skip
    parser.add_argument("--response", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("benchmarks.gpu: found no CUDA device; use --tiny to run toy members on the CPU")
        return 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = bandwidth(device, 1 << (24 if args.tiny else 31))
    first, second = (
        make_member(kind, seed, device, tiny=args.tiny)
        for seed, kind in enumerate(("Llama", "Mistral"))
    )
    again = HuggingFaceBackend(first.model, first.tokenizer, "again", prefix_cache_bytes=0)
    lines: list[Line] = []
    for length in args.prompts:
        prompt = f"{PASSAGE} " * length
        name = f"prompt of {len(first.codec.encode_prompt(prompt)):,} tokens"
        lines += compare((first, second), f"{name}, members that differ", prompt, args, rate)
        lines += compare((first, again), f"{name}, members that agree", prompt, args, rate)
    for key, value in machine().items():
        print(f"- {key}: {value}")
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        print(f"- device: {torch.cuda.get_device_name(device)}, {peak:.1f} GiB allocated")
    print(f"- memory: {rate / 1e9:.0f} GB/s\n\n{table(lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
