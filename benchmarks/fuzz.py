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
from collections.abc import Iterator, Sequence
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


def _check(seed: int, numbers: range) -> Tally:
    import torch

    from tests.support import fuzz

    torch.set_num_threads(1)
    return fuzz.run(seed, numbers)


def _tallies(args: argparse.Namespace) -> Iterator[Tally]:
    check = partial(_check, args.seed)
    if args.case is not None:
        yield check(range(args.case, args.case + 1))
        return
    starts = range(0, args.cases, CHUNK)
    chunks = [range(start, min(start + CHUNK, args.cases)) for start in starts]
    if args.jobs == 1:
        yield from map(check, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        yield from pool.imap_unordered(check, chunks)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the cases and print the violations. Return 1 if there are any."""
    from tests.support.fuzz import Tally

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description="Check many random decodes."
    )
    parser.add_argument("--cases", type=int, default=10_000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    parser.add_argument("--case", type=int, help="check only the case with this number")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    args = parser.parse_args(argv)
    total, start = Tally(), time.perf_counter()
    for number, tally in enumerate(_tallies(args), start=1):
        for each in tally.violations[: max(0, SHOWN - len(total.violations))]:
            print(f"{each.kind}: {each.what}\n    {each.command}", flush=True)
        total.add(tally)
        if number % 8 == 0:
            done = f"{total.cases.total()} cases, {len(total.violations)} violations"
            print(f"{time.perf_counter() - start:6.0f} s  {done}", file=sys.stderr, flush=True)
    print(f"\n{'kind':10}{'cases':>10}{'violations':>12}")
    for kind, cases in sorted(total.cases.items()):
        wrong = sum(each.kind == kind for each in total.violations)
        print(f"{kind:10}{cases:10}{wrong:12}")
    cases, wrong = total.cases.total(), len(total.violations)
    seconds = time.perf_counter() - start
    print(f"{'all':10}{cases:10}{wrong:12}   seed {args.seed}, {seconds:.0f} s")
    return 1 if total.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
