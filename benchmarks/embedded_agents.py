"""Measure how often the embedded members, alone and fused, succeed as agents with two tools.

    python benchmarks/embedded_agents.py                # 100 held-out cases of each form
    python benchmarks/embedded_agents.py --cases 40 --output agents.json

A case is a question of the held-out split that needs `look_up`, `calculate`, both in sequence, or
neither. It succeeds if every call names the right tool with exactly the right argument and the
answer is exactly right. A case ends at its first wrong turn.

The benchmark also asks the questions of the handbook. For these questions, the tools run with the
arguments that the member writes, and only the answer counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from adafuse_llm.embedded import final_answer, handbook_questions, member_paths
from adafuse_llm.embedded.tools import TOOLS
from training.dialogues import FORMS, Form, act, is_same_turn, turns_of
from training.world import NEEDS, AgentCase, Names, draw_agent_case

ENSEMBLE: Final = "ensemble"
MAX_NEW_TOKENS: Final = 160


def heldout_cases(n_cases: int, seed: int) -> list[AgentCase]:
    """Draw ``n_cases`` cases of the held-out split, divided equally among the needs."""
    cases = []
    for index, need in enumerate(NEEDS):
        names = Names(random.Random(f"agents {seed} {need}"), "heldout")
        wanted = (n_cases + len(NEEDS) - 1 - index) // len(NEEDS)
        cases += [draw_agent_case(names, need) for _ in range(wanted)]
    return cases


Job = tuple[str, Form, AgentCase | int]  # a drawn case, or the number of a handbook question
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


def _judge(job: Job) -> dict[str, Any]:
    """Run one case with one engine. Return whether the case succeeded, and its first wrong turn."""
    system, form, case = job

    def reply(messages: Sequence[Mapping[str, Any]]) -> str:
        generation = _engines[system].generate(messages=messages, max_new_tokens=MAX_NEW_TOKENS)
        text: str = generation.text
        return text

    if isinstance(case, int):
        question = handbook_questions()[case]
        answer = act(reply, form, question.question)
        row = {"need": "handbook" if question.source else "handbook, not stated"}
        right = answer is not None and final_answer(answer) == question.answer
        row |= {"question": question.question, "expected": question.answer}
        return row | {"system": system, "form": form, "right": right, "said": answer}
    row = {"system": system, "form": form, "need": case.need, "question": case.question}
    for number, (messages, expected) in enumerate(turns_of(case, form, TOOLS)):
        text = reply(messages)
        if not is_same_turn(text, expected, form):
            return row | {"right": False, "turn": number, "expected": expected, "said": text}
    return row | {"right": True}


def _run(jobs: Sequence[Job], workers: int) -> Iterator[dict[str, Any]]:
    if workers == 1:
        _start_worker(1)
        yield from map(_judge, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (1,)) as pool:
        yield from pool.imap_unordered(_judge, jobs, chunksize=4)


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the percentage of successful cases by form, need and system.

    The need ``all`` stands for all drawn cases.
    """
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for form in FORMS:
        of_form = [row for row in rows if row["form"] == form]
        needs = [
            *NEEDS,
            "all",
            *dict.fromkeys(r["need"] for r in of_form if r["need"] not in NEEDS),
        ]
        for need in needs:
            for row in of_form:
                if need == row["need"] or (need == "all" and row["need"] in NEEDS):
                    by_need = summary.setdefault(form, {}).setdefault(need, {})
                    by_need.setdefault(row["system"], 0.0)
        for need, by_system in summary.get(form, {}).items():
            for system in by_system:
                right = [
                    row["right"]
                    for row in of_form
                    if row["system"] == system
                    and (need == row["need"] or (need == "all" and row["need"] in NEEDS))
                ]
                by_system[system] = 100 * sum(right) / len(right)
    return summary


def as_markdown(summary: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Format the summary as a Markdown table for each form."""
    systems = [*(path.name for path in member_paths()), ENSEMBLE]
    lines = []
    for form, needs in summary.items():
        lines += [f"Success in percent, {form}", ""]
        lines += ["| question needs | " + " | ".join(systems) + " |", "|---|" + "---:|" * 4]
        for need, by_system in needs.items():
            cells = [f"{by_system[system]:.1f}" for system in systems]
            lines.append(f"| {need.replace('_', ' ')} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=100, help="number of drawn cases of each form")
    parser.add_argument(
        "--handbook", type=int, default=1, help="ask every n-th question of the handbook"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--workers", type=int, default=2, help="number of processes, each with one thread"
    )
    parser.add_argument(
        "--output", type=Path, help="write the summary and all cases to this file, as JSON"
    )
    args = parser.parse_args(argv)
    for name in ("cases", "handbook", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    from tqdm.auto import tqdm

    args = _arguments(argv)
    handbook = range(0, len(handbook_questions()), args.handbook)
    jobs: list[Job] = [
        (system, form, case)
        for system in (ENSEMBLE, *(path.name for path in member_paths()))
        for form in FORMS
        for case in (*heldout_cases(args.cases, args.seed), *handbook)
    ]
    rows = list(tqdm(_run(jobs, args.workers), total=len(jobs), unit="case"))
    summary = summarize(rows)
    print(as_markdown(summary))
    if args.output:
        report = {"settings": vars(args) | {"output": None}, "success": summary, "cases": rows}
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
