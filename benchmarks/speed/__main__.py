"""Run the comparisons of this package from the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # torch reads these on import
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons, print the table and write the files."""
    import torch
    import transformers

    from benchmarks.speed.comparisons import COMPARISONS
    from benchmarks.speed.measure import Line, machine, read_lines, table
    from benchmarks.speed.own import MEASUREMENTS
    from benchmarks.speed.suites import SUITES

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description="Measure what an ensemble costs."
    )
    parser.add_argument(
        "--suite", choices=[*SUITES, "own"], default="embedded",
        help="which members to measure: small ones, or the real ones that `make real` fetches; "
        "own: what the engine costs beside their passes",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", choices=[*COMPARISONS, *MEASUREMENTS], metavar="NAME",
        help=f"run only some of {', '.join(COMPARISONS)}; of own: {', '.join(MEASUREMENTS)}",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="use toy sizes")
    parser.add_argument("--first", action="store_true", help="only the suite's first ensemble")
    parser.add_argument(
        "--tokens", type=int, help="longest response; drafts and own have their sizes"
    )
    parser.add_argument(
        "--output", type=Path,
        help="write the measurements to this file, as JSON; other comparisons in it are kept",
    )  # fmt: skip
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    stored: dict[str, Any] = {}
    if args.output and args.output.is_file():
        stored = json.loads(args.output.read_text(encoding="utf-8"))
    works: dict[str, Callable[[], Iterable[Line]]]
    if args.suite == "own":
        works = dict(MEASUREMENTS)
    else:
        chosen = SUITES[args.suite]()
        if args.quick:
            chosen = chosen.quick()
        if args.first:
            chosen = replace(chosen, groups=chosen.groups[:1])
        if args.tokens:
            chosen = replace(chosen, response=args.tokens)
        works = {name: partial(run, chosen, args.suite) for name, run in COMPARISONS.items()}
    for name in args.only or works:
        print(f"{args.suite}: {name}", file=sys.stderr, flush=True)
        start, header = time.perf_counter(), machine()
        lines = [line._asdict() for line in works[name]()]
        took = f"{time.perf_counter() - start:.0f} s"
        stored[f"{args.suite}: {name}"] = {**header, "took": took, "lines": lines}
        if args.output:
            args.output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    shown = table(line for part in stored.values() for line in read_lines(part))
    print(shown)
    if args.markdown:
        args.markdown.write_text(shown + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
