"""Run the comparisons of this package from the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # torch reads these on import
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    from benchmarks.speed.comparisons import COMPARISONS
    from benchmarks.speed.real import PARTS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description="Measure what the ensemble costs."
    )
    parser.add_argument("--quick", action="store_true", help="use toy sizes; takes about a minute")
    parser.add_argument(
        "--suite", choices=("embedded", "real"), default="embedded",
        help="which members to measure: small ones, or the real ones that `make real` fetches",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", choices=(*COMPARISONS, *PARTS), metavar="NAME",
        help=f"run only these comparisons: {', '.join(COMPARISONS)}; or parts of the real suite: "
        f"{', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path,
        help="write all measurements to this file, as JSON; the real suite keeps other parts in it",
    )  # fmt: skip
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    known = PARTS if args.suite == "real" else COMPARISONS
    args.only = args.only or list(known)
    if wrong := [name for name in args.only if name not in known]:
        parser.error(f"--suite {args.suite} has no {', '.join(wrong)}; it has {', '.join(known)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons, print the table and write the files."""
    import torch
    import transformers

    from benchmarks.speed import real
    from benchmarks.speed.comparisons import COMPARISONS, FULL, QUICK
    from benchmarks.speed.measure import Report, as_markdown, machine

    args = _arguments(argv)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if args.suite == "real":
        sizes = real.QUICK if args.quick else real.Size()
        table = real.measure(args.only, sizes, args.output, machine())
        print(table)
        if args.markdown:
            args.markdown.write_text(table + "\n", encoding="utf-8")
        return 0
    size = QUICK if args.quick else FULL
    header = {**machine(), "size": f"{'quick' if args.quick else 'full'}, {size}"}
    report = Report()
    start = time.perf_counter()
    for name in args.only:
        print(f"{time.perf_counter() - start:6.0f} s  {name}", file=sys.stderr, flush=True)
        COMPARISONS[name](report, size)
    header["took"] = f"{time.perf_counter() - start:.0f} s for {', '.join(args.only)}"
    table = as_markdown(report, header)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n", encoding="utf-8")
    if args.output:
        measured = {"header": header, **report.as_json()}
        args.output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
