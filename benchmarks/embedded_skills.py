"""Exact match of the embedded members on held-out questions, alone and as an ensemble.

    python benchmarks/embedded_skills.py                      # 300 questions per skill
    python benchmarks/embedded_skills.py --per-skill 50 --output skills.json
    python benchmarks/embedded_skills.py --seed 2             # other questions

Every question has the standard prompt (``question_messages``). It has three passages, of which two
are distractors; arithmetic questions have no passages. Names, values and problems come from the
held-out split and do not occur in the training data. The package includes the default questions.
With another ``--seed`` or number of ``--passages``, `training.freeze` draws other questions. A
single member decodes greedily with the same engine class, as an ensemble of one member with
``branching_factor=1``. The cost consists of the forward passes and tokens that the engine reports
for each member, per whitespace-separated word of the answer. The tokens of the prompt do not count
as tokens per word, whether a pass or the prefix cache provides them; they are reported separately.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from adafuse_llm.embedded import heldout_questions, member_paths
from adafuse_llm.errors import InvalidInputError
from benchmarks.paper.metrics import verbatim
from benchmarks.paper.tasks import TASKS, Question
from training.freeze import PASSAGES, SEED, draw_questions
from training.world import SKILLS

ENSEMBLE: Final = "ensemble"
COSTS: Final = ("forward_passes", "tokens_processed", "prompt_tokens", "cached_tokens")


TASK: Final = TASKS["embedded"]


def choose_questions(per_skill: int, seed: int, n_passages: int) -> list[Question]:
    """Return ``per_skill`` questions of every skill, grouped by skill.

    Raises:
        InvalidInputError: the package has fewer questions than requested.
    """
    most = per_skill * len(SKILLS)
    shipped = (seed, n_passages) == (SEED, PASSAGES)
    heldout = heldout_questions(most) if shipped else islice(draw_questions(seed, n_passages), most)
    questions = [Question.from_heldout(number, each) for number, each in enumerate(heldout, 1)]
    return [question for skill in SKILLS for question in questions if question.group == skill]


_engines: dict[str, Any] = {}


def _start_worker(threads: int) -> None:
    import torch

    from adafuse_llm import AdaFuseConfig, AdaFuseEngine

    torch.set_num_threads(threads)
    paths = [str(path) for path in member_paths()]
    _engines[ENSEMBLE] = AdaFuseEngine.from_pretrained(paths, config=AdaFuseConfig())
    for path in member_paths():
        greedy = AdaFuseConfig(branching_factor=1)
        _engines[path.name] = AdaFuseEngine.from_pretrained([str(path)], config=greedy)


def _answer(job: tuple[str, int, Question]) -> dict[str, Any]:
    """Answer a question with one engine. Return the answer, whether it is right, and its cost."""
    system, index, question = job
    start = time.perf_counter()
    generation = _engines[system].generate(**question.request, **TASK.options)
    usage = generation.usage
    return {
        "system": system,
        "index": index,
        "skill": question.group,
        "question": question.text,
        "expected": question.accepted[0],
        "answer": generation.text,
        "right": verbatim(TASK.read(generation.text), question.accepted),
        "words": len(generation.text.split()),
        "rounds": len(generation.rounds),
        "seconds": time.perf_counter() - start,
        **{cost: dict(getattr(usage, cost)) for cost in COSTS},
    }


def _run(jobs: Sequence[tuple[str, int, Question]], workers: int) -> Iterator[dict[str, Any]]:
    if workers == 1:
        _start_worker(1)
        yield from map(_answer, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (1,)) as pool:
        yield from pool.imap_unordered(_answer, jobs, chunksize=8)


def summarize(results: Sequence[dict[str, Any]], members: Sequence[str]) -> dict[str, Any]:
    """Return exact match in percent by system and skill, and the ensemble's cost by member."""
    exact: dict[str, dict[str, float]] = {}
    for system in (*members, ENSEMBLE):
        rows = [row for row in results if row["system"] == system]
        by_skill = {
            skill: [row["right"] for row in rows if row["skill"] == skill] for skill in SKILLS
        }
        exact[system] = {
            skill: 100 * sum(right) / len(right) for skill, right in by_skill.items() if right
        }
        exact[system]["overall"] = sum(exact[system].values()) / len(exact[system])
    fused = [row for row in results if row["system"] == ENSEMBLE]
    words = max(1, sum(row["words"] for row in fused))
    cost = {}
    for member in members:
        passes, processed, prompt, cached = (
            sum(row[name][member] for row in fused) for name in COSTS
        )
        cost[member] = {
            "forward_passes_per_word": passes / words,
            "tokens_per_word": (processed + cached - prompt) / words,
            "prompt_tokens_per_question": prompt / max(1, len(fused)),
        }
    best = max(members, key=lambda member: exact[member]["overall"])
    return {
        "exact_match": exact,
        "best_member": best,
        "margin_over_best": exact[ENSEMBLE]["overall"] - exact[best]["overall"],
        "cost": cost,
        "words_per_answer": words / max(1, len(fused)),
        "rounds_per_answer": sum(row["rounds"] for row in fused) / max(1, len(fused)),
    }


def as_markdown(summary: dict[str, Any], per_skill: int) -> str:
    """Return the summary as two Markdown tables."""
    exact = summary["exact_match"]
    systems = list(exact)
    lines = [
        f"Exact match in percent, {per_skill} held-out questions per skill",
        "",
        "| skill | " + " | ".join(systems) + " |",
        "|---|" + "---:|" * len(systems),
    ]
    for skill in exact[ENSEMBLE]:
        cells = [f"{exact[system][skill]:.1f}" for system in systems]
        lines.append(f"| {skill.replace('_', ' ')} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Ensemble over the best member ({summary['best_member']}): "
        f"{summary['margin_over_best']:+.1f} points",
        "",
        "Cost of the ensemble per committed word "
        f"({summary['words_per_answer']:.1f} words and {summary['rounds_per_answer']:.1f} rounds "
        "per answer)",
        "",
        "| member | forward passes | tokens processed | prompt tokens per question |",
        "|---|---:|---:|---:|",
    ]
    for member, cost in summary["cost"].items():
        lines.append(
            f"| {member} | {cost['forward_passes_per_word']:.2f} | {cost['tokens_per_word']:.2f} "
            f"| {cost['prompt_tokens_per_question']:.0f} |"
        )
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--per-skill", type=int, default=300, help="number of questions per skill")
    parser.add_argument(
        "--passages", type=int, default=PASSAGES, help="number of passages in every prompt"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="seed for drawing the questions")
    parser.add_argument(
        "--workers", type=int, default=2, help="number of processes, with one thread each"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the summary and every answer")
    args = parser.parse_args(argv)
    for name in ("per_skill", "passages", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line, and return the exit code."""
    from tqdm.auto import tqdm

    args = _arguments(argv)
    members = [path.name for path in member_paths()]
    try:
        questions = choose_questions(args.per_skill, args.seed, args.passages)
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    jobs = [
        (system, index, question)
        for system in (ENSEMBLE, *members)
        for index, question in enumerate(questions)
    ]
    results = list(tqdm(_run(jobs, args.workers), total=len(jobs), unit="answer"))
    results.sort(key=lambda row: (row["system"], row["index"]))
    summary = summarize(results, members)
    print(as_markdown(summary, args.per_skill))
    if args.output:
        report = {"settings": vars(args) | {"output": None}, **summary, "answers": results}
        args.output.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
