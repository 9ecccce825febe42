"""Check many random decodes, and print how to repeat those that violate what must hold.

``python -m benchmarks.fuzz --cases 100000`` takes half an hour on one core. ``tests.support.fuzz``
lists the kinds of cases.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # torch reads these on import
    os.environ.setdefault(variable, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if TYPE_CHECKING:
    from tests.support.fuzz import Tally

CHUNK = 250
"""Number of cases that a process checks at a time."""

SHOWN = 40
"""Number of violations to print. All are counted."""


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    from tests.support.fuzz import KINDS, MODEL_SHARE

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description="Check many random decodes."
    )
    parser.add_argument("--cases", type=int, default=10_000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    parser.add_argument("--case", type=int, help="check only the case with this number")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument(
        "--only", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND",
        help=f"check only these kinds: {', '.join(KINDS)}",
    )  # fmt: skip
    parser.add_argument(
        "--model-share", type=float, default=MODEL_SHARE,
        help="share of the cases that use tiny random models (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(argv)


def _check(seed: int, kinds: Sequence[str], model_share: float, numbers: range) -> Tally:
    import torch

    from tests.support import fuzz

    torch.set_num_threads(1)
    return fuzz.run(seed, numbers, kinds=kinds, model_share=model_share)


def _tallies(args: argparse.Namespace) -> Iterator[Tally]:
    check = partial(_check, args.seed, args.only, args.model_share)
    if args.case is not None:
        yield check(range(args.case, args.case + 1))
        return
    starts: Iterable[int] = range(0, args.cases, CHUNK)
    chunks = [range(start, min(start + CHUNK, args.cases)) for start in starts]
    if args.jobs == 1:
        yield from map(check, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        yield from pool.imap_unordered(check, chunks)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the cases and print the violations. Return 1 if there are any."""
    from tests.support.fuzz import Tally

    args = _arguments(argv)
    total, start = Tally(), time.perf_counter()
    for number, tally in enumerate(_tallies(args), start=1):
        left = max(0, SHOWN - len(total.violations))
        for each in tally.violations[:left]:
            print(f"{each.kind}: {each.what}\n    {_command(each.command, args)}", flush=True)
        total.add(tally)
        if number % 8 == 0:
            seconds = time.perf_counter() - start
            done = total.cases.total()
            print(
                f"{seconds:6.0f} s  {done} cases, {len(total.violations)} violations",
                file=sys.stderr,
                flush=True,
            )
    seconds = time.perf_counter() - start
    print(f"\n{'kind':10}{'cases':>10}{'violations':>12}")
    for kind, cases in sorted(total.cases.items()):
        wrong = sum(each.kind == kind for each in total.violations)
        print(f"{kind:10}{cases:10}{wrong:12}")
    cases, wrong = total.cases.total(), len(total.violations)
    print(f"{'all':10}{cases:10}{wrong:12}   seed {args.seed}, {seconds:.0f} s")
    return 1 if total.violations else 0


def _command(command: str, args: argparse.Namespace) -> str:
    """The command that repeats a case, with the options that choose the cases."""
    from tests.support.fuzz import KINDS, MODEL_SHARE

    if args.only != list(KINDS):
        command += f" --only {' '.join(args.only)}"
    if args.model_share != MODEL_SHARE:
        command += f" --model-share {args.model_share}"
    return command


if __name__ == "__main__":
    raise SystemExit(main())
