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
   the above.

The seed of the run, the member and the step determine the text of each step. An interrupted run
therefore continues from its checkpoint with the same texts as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from training.recipes import RECIPES
from training.schedule import AGENT_STEPS, LONG_STEPS, STEPS


def train(args: argparse.Namespace, name: str) -> None:
    """Train one member with one thread, and write it to ``args.out``."""
    import torch

    from training.trainer import Trainer

    torch.set_num_threads(1)
    trainer = Trainer(
        RECIPES[name],
        args.work,
        steps=args.steps,
        agent_steps=args.agent_steps,
        long_steps=args.long_steps,
        seed=args.seed,
    )
    trainer.resume()
    while trainer.step < trainer.last:
        loss = trainer.train_step()
        if trainer.step % 10 == 0 or trainer.step == trainer.last:
            sys.stdout.write(f"{name}: step {trainer.step} of {trainer.last}, loss {loss:.3f}\n")
            sys.stdout.flush()
        if trainer.step % 100 == 0 or trainer.step == trainer.last:
            trainer.save()
    trainer.export(args.out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description="Train the embedded members from random weights. An interrupted run "
        "continues from its last checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    work = Path("embedded-training")
    parser.add_argument("--work", type=Path, default=work, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=work / "members", help="folder for the members")
    parser.add_argument("--members", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the first two parts")
    parser.add_argument("--agent-steps", type=int, default=AGENT_STEPS, help="of the tools part")
    parser.add_argument("--long-steps", type=int, default=LONG_STEPS, help="of the last part")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--workers", type=int, default=2, help="members trained at the same time")
    parser.add_argument("--smoke", action="store_true", help="run only a few steps of each part")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps, args.agent_steps, args.long_steps = 11, 4, 2
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, spawn) as pool:
        list(pool.map(partial(train, args), args.members))
    return 0


if __name__ == "__main__":
    sys.exit(main())
