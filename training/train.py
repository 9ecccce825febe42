"""Train the embedded members from random weights: ``python -m training.train --help``.

Three members of different architectures and vocabularies learn the same skills with different
emphasis. A training example is a *pack*: one prompt with many questions that branch off it. The
attention mask lets each branch see only the prompt and itself, and positions in every branch
continue from the prompt. So a model sees each question exactly as in a later request, but reads the
passages only once for all questions.

Training has four parts:

1. the main part: reading and arithmetic;
2. for some members, more of the skills they specialize in;
3. the tools part: agents with tools, mixed with reading and arithmetic;
4. long answers: questions of several parts, summaries and longer word problems, mixed with all of
   the above. With ``--start-from``, only this part runs, and it starts from trained members.

The seed of the run, the member and the step determine the text of each step. An interrupted run
therefore continues from its checkpoint with the same texts as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adafuse_llm.embedded import member_paths
from training.recipes import RECIPES
from training.schedule import (
    DEFAULT_AGENT_STEPS,
    DEFAULT_LONG_STEPS,
    DEFAULT_STEPS,
    last_step,
)
from training.tokenizers import copy_tokenizer
from training.trainer import Trainer


def _report(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _train_one(args: argparse.Namespace, name: str, until: int) -> None:
    """Train one member up to step ``until`` and print reports as JSON lines."""
    torch.set_num_threads(args.threads)
    if args.start_from:
        copy_tokenizer(args.start_from / name, args.work / name)
    trainer = Trainer(
        RECIPES[name],
        args.work,
        steps=args.steps,
        seed=args.seed,
        agent_steps=args.agent_steps,
        long_steps=args.long_steps,
    )
    if not (args.resume and trainer.resume()) and args.start_from:
        trainer.start_from(args.start_from / name)
    losses: list[float] = []
    until = min(until, trainer.last)
    while trainer.step < until:
        losses.append(trainer.train_step())
        if trainer.step % 10 == 0 or trainer.step == until:
            loss = sum(losses) / len(losses)
            losses.clear()
            _report({"member": name, "step": trainer.step, "loss": loss})
        if trainer.step % args.save_every == 0 or trainer.step == until:
            trainer.save()
        if args.check_every and trainer.step % args.check_every == 0:
            checked = {key: round(value, 3) for key, value in trainer.check().items()}
            _report({"member": name, "step": trainer.step, "heldout": checked})
    if trainer.step == trainer.last:
        trainer.export(args.out)


def plan_lanes(
    members: Sequence[str], steps: int, workers: int, first: int = 0
) -> list[list[tuple[str, int]]]:
    """Return the jobs of each worker, as (member, last step). Training starts at step ``first``.

    If two workers train three members, each worker trains half of the third member, so that both
    workers finish at about the same time.
    """
    if workers >= len(members) or workers == 1:
        lanes: list[list[tuple[str, int]]] = [[] for _ in range(min(workers, len(members)))]
        for index, member in enumerate(members):
            lanes[index % len(lanes)].append((member, steps))
        return lanes
    if len(members) == 3 and workers == 2:
        a, b, c = members
        return [[(c, (first + steps) // 2), (a, steps)], [(b, steps), (c, steps)]]
    lanes = [[] for _ in range(workers)]
    for index, member in enumerate(members):
        lanes[index % workers].append((member, steps))
    return lanes


def _run_lane(
    args: argparse.Namespace, lane: Sequence[tuple[str, int]], bars: Mapping[str, Any]
) -> None:
    """Run the jobs of one worker in sequence, each in its own process."""
    for name, until in lane:
        command = [sys.executable, "-m", "training.train", "--worker", name]
        command += ["--until", str(until), "--steps", str(args.steps), "--seed", str(args.seed)]
        command += ["--out", str(args.out), "--work", str(args.work)]
        command += ["--threads", str(args.threads), "--save-every", str(args.save_every)]
        command += ["--check-every", str(args.check_every)]
        command += ["--agent-steps", str(args.agent_steps), "--long-steps", str(args.long_steps)]
        if args.start_from:
            command += ["--start-from", str(args.start_from)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        with subprocess.Popen(  # noqa: S603
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                report = json.loads(line)
                bar = bars[name]
                if "heldout" in report:
                    bar.write(line.strip())
                else:
                    bar.update(report["step"] - bar.n)
                    bar.set_postfix(loss=f"{report['loss']:.3f}")
        if child.returncode != 0:
            raise RuntimeError(f"training {name} failed with exit code {child.returncode}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description="Train the embedded members from random weights. An interrupted run "
        "continues from its last checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=member_paths()[0].parent, help="folder to write the members to"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("embedded-training"), help="folder for checkpoints"
    )
    parser.add_argument("--members", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        help="number of steps that each member runs in the first two parts",
    )
    parser.add_argument(
        "--agent-steps", type=int, default=DEFAULT_AGENT_STEPS, help="steps in the tools part"
    )
    parser.add_argument(
        "--long-steps",
        type=int,
        default=DEFAULT_LONG_STEPS,
        help="steps in the part with long answers",
    )
    parser.add_argument(
        "--start-from",
        type=Path,
        help="start from the trained members in this folder and run only the part with long "
        "answers",
    )
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument(
        "--workers", type=int, default=2, help="number of members trained in parallel"
    )
    parser.add_argument("--threads", type=int, default=1, help="number of threads per member")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument(
        "--check-every", type=int, default=0, help="steps between checks; 0 for none"
    )
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--worker", choices=list(RECIPES), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name, least in (
        ("steps", 1),
        ("agent_steps", 0),
        ("long_steps", 0),
        ("workers", 1),
        ("threads", 1),
        ("save_every", 1),
    ):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _arguments(argv)
    if args.worker:
        steps = args.steps + args.agent_steps + args.long_steps
        _train_one(args, args.worker, args.until or steps)
        return 0
    from tqdm.auto import tqdm

    if not args.resume:
        for name in args.members:
            (args.work / name / "checkpoint.pt").unlink(missing_ok=True)
    before_long = args.steps + args.agent_steps
    lanes = plan_lanes(
        args.members,
        before_long + args.long_steps,
        args.workers,
        first=before_long if args.start_from else 0,
    )
    bars = {
        name: tqdm(
            total=last_step(RECIPES[name], args.steps) + args.agent_steps + args.long_steps,
            desc=name,
            position=position,
            unit="step",
        )
        for position, name in enumerate(args.members)
    }
    failures: list[str] = []

    def run(lane: Sequence[tuple[str, int]]) -> None:
        try:
            _run_lane(args, lane, bars)
        except RuntimeError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=run, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for bar in bars.values():
        bar.close()
    for failure in failures:
        sys.stderr.write(failure + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
