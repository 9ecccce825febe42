"""Measure the speed of an ensemble of an 8B and a 7B member on a GPU.

    python -m benchmarks.gpu                  # needs a CUDA device with about 40 GB
    python -m benchmarks.gpu --tiny           # the same with toy members, on any device

The members have the configurations of Llama-3.1-8B and Mistral-7B v0.3 and random weights in
bfloat16, created on the device. A script (``benchmarks.speed.script``) determines which text
they write and how many words they agree on in each round, so that they agree as often as trained
members do. The benchmark compares the engine's time with three other times: the time of the
members' own ``generate()`` with a dynamic cache, the same with a static cache, and the time that
the device needs to read the weights once for each token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from adafuse_llm.embedded import member_paths
from benchmarks.speed.comparisons import engines_and_alone, point_of, run_once
from benchmarks.speed.measure import Report, as_markdown, machine, take_turns
from benchmarks.speed.members import Members, make_engine, make_member, prompt_of
from benchmarks.speed.peers import add_up, outcome_of, run_generate
from benchmarks.speed.script import WORDS_PER_ROUND, make_scripted, write_script

LLAMA: Final[dict[str, Any]] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
MISTRAL: Final[dict[str, Any]] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_768,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
TINY: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
}
NO_END: Final = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONCURRENT: Final = 16
"""Concurrent requests in the measurement of throughput."""


def scripted_members(device: torch.device, positions: int, *, tiny: bool) -> Members:
    """Make the two scripted members, with the tokenizers of two embedded members."""
    members = []
    kinds = (("llama", "Llama", LLAMA), ("mistral", "Mistral", MISTRAL))
    for index, (name, prefix, sizes) in enumerate(kinds):
        settings = {**sizes, **(TINY if tiny else {}), **NO_END}
        config = getattr(transformers, f"{prefix}Config")(**settings)
        torch.manual_seed(index)
        previous_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
        finally:
            torch.set_default_dtype(previous_dtype)
        make_scripted(model, positions)
        tokenizer = transformers.AutoTokenizer.from_pretrained(member_paths()[index])
        members.append(make_member(name, model, tokenizer))
    return tuple(members)


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


def weight_bytes(model: Any) -> int:
    """Count the bytes of the weights that a pass reads: all except the input embeddings."""
    embeddings = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not embeddings)


def compare(
    report: Report,
    members: Members,
    sizes: tuple[int, int],
    repeats: int,
    words_per_round: Sequence[float],
    bytes_per_second: float,
) -> None:
    """Compare the engine with ``generate()`` and with the limit that memory bandwidth sets.

    Args:
        report: the report to add the rows and figures to.
        members: scripted members.
        sizes: numbers of tokens in the prompt and the response.
        repeats: number of timed runs of each system.
        words_per_round: shares of the rounds that commit one, two and three words.
        bytes_per_second: memory bandwidth of the device.
    """
    prompt, response = sizes
    text = prompt_of(prompt)
    write_script(members, text, " " + prompt_of(2 * response + 8, seed=1), words_per_round)
    systems, alone = engines_and_alone(members, text, response, (1, 3), drafting=(True, False))
    ids = [member.encode(text) for member in members]
    new = list(systems["engine, B = 1"]().tokens.values())
    static = "generate(), static cache, as B = 1"
    systems[static] = partial(run_generate, members, ids, new, cache_implementation="static")
    engine = make_engine(members, max_new_tokens=response, max_requests=CONCURRENT)
    systems[f"engine, B = 3, {CONCURRENT} at once"] = lambda: add_up(
        [outcome_of(each) for each in engine.generate_batch([text] * CONCURRENT)]
    )
    point = point_of(prompt, response)
    rows = take_turns("gpu", point, systems, repeats, warm=run_once(alone))
    report.rows += rows.values()
    weights = {member.name: weight_bytes(member.model) for member in members}
    for branches in (1, 3):
        row = rows[f"engine, B = {branches}"]
        limit = sum(weights[name] * n for name, n in row.outcome.tokens.items()) / bytes_per_second
        report.figures += [
            (
                f"engine / generate(), static cache, B = {branches}, {point}",
                f"{row.median / rows[static].median:.2f} x",
            ),
            (
                f"engine / least time to read the weights, B = {branches}, {point}",
                f"{row.median / limit:.2f} x of {limit:.3f} s",
            ),
        ]
    per_request = rows[f"engine, B = 3, {CONCURRENT} at once"].median / CONCURRENT
    report.figures.append(
        (
            f"throughput of {CONCURRENT} at once / one at a time, B = 3, {point}",
            f"{rows['engine, B = 3'].median / per_request:.2f} x",
        )
    )
    rounds = engine.generate(text).rounds
    counts = Counter(len(each.text.split()) for each in rounds)
    shares = ", ".join(f"{words}: {100 * n / len(rounds):.0f} %" for words, n in counts.items())
    report.figures.append((f"rounds by words committed, {point}", shares))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Measure the ensemble on a GPU."
    )
    parser.add_argument("--tiny", action="store_true", help="use toy members, on any device")
    parser.add_argument("--prompts", type=int, nargs="+", default=[500, 2000], metavar="TOKENS")
    parser.add_argument("--response", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--words-per-round", type=float, nargs=3, default=WORDS_PER_ROUND, metavar="SHARE",
        help="shares of the rounds that commit one, two and three words",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="write all measurements to this file, as JSON")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons, print the table and write the files."""
    args = _arguments(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("benchmarks.gpu: found no CUDA device; use --tiny to run toy members on the CPU")
        return 1
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    positions = max(args.prompts) + 3 * args.response + 64
    members = scripted_members(device, positions, tiny=args.tiny)
    bytes_per_second = bandwidth(device, 1 << (24 if args.tiny else 31))
    header = {
        **machine(),
        "device": str(device),
        "memory bandwidth": f"{bytes_per_second / 1e9:.0f} GB/s",
    }
    if device.type == "cuda":
        header["device"] = torch.cuda.get_device_name(device)
    report = Report()
    for prompt in args.prompts:
        sizes = prompt, args.response
        compare(report, members, sizes, args.repeats, args.words_per_round, bytes_per_second)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        report.figures.append(("most memory allocated", f"{peak / 2**30:.1f} GiB"))
    table = as_markdown(report, header)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n", encoding="utf-8")
    if args.output:
        measured = {"header": header, **report.as_json()}
        args.output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
