"""Check many random decodes, and print how to repeat the faulty ones.

``python -m benchmarks.fuzz --cases 100000`` takes half an hour on one core. ``tests.support.fuzz``
lists the kinds of cases.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # torch reads these on import
    os.environ.setdefault(variable, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHOWN = 40
"""Number of violations to print. All are counted."""


def _check(seed: int, number: int) -> tuple[int, str, str]:
    from tests.support.fuzz import violation

    return number, *violation(seed, number)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the cases and print the violations. Return 1 if there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description="Check many random decodes."
    )
    parser.add_argument("--cases", type=int, default=10_000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    parser.add_argument("--case", type=int, help="check only the case with this number")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    args = parser.parse_args(argv)
    numbers = range(args.cases) if args.case is None else [args.case]
    cases, wrong, start = Counter[str](), Counter[str](), time.perf_counter()
    check = partial(_check, args.seed)
    with ExitStack() as stack:
        found: Iterator[tuple[int, str, str]] = map(check, numbers)
        if args.jobs > 1:
            pool = multiprocessing.get_context("spawn").Pool(args.jobs)
            found = stack.enter_context(pool).imap(check, numbers, 250)
        for number, kind, what in found:
            cases[kind] += 1
            wrong[kind] += bool(what)
            if what and wrong.total() <= SHOWN:
                again = f"python -m benchmarks.fuzz --seed {args.seed} --case {number}"
                print(f"{kind}: {what}\n    {again}", flush=True)
            if cases.total() % 2000 == 0:
                done = f"{cases.total()} cases, {wrong.total()} violations"
                print(f"{time.perf_counter() - start:6.0f} s  {done}", file=sys.stderr, flush=True)
    print(f"\n{'kind':10}{'cases':>10}{'violations':>12}")
    for kind in sorted(cases):
        print(f"{kind:10}{cases[kind]:10}{wrong[kind]:12}")
    seconds = time.perf_counter() - start
    total = f"{'all':10}{cases.total():10}{wrong.total():12}"
    print(f"{total}   seed {args.seed}, {seconds:.0f} s")
    return 1 if wrong.total() else 0


if __name__ == "__main__":
    raise SystemExit(main())
