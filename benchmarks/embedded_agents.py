"""Measure how often the embedded members, alone and fused, succeed as agents with two tools.

    python benchmarks/embedded_agents.py                # 100 held-out cases of each form
    python benchmarks/embedded_agents.py --cases 40 --output agents.json

A case is a question of the held-out split that needs `look_up`, `calculate`, both in sequence, or
neither. It succeeds if every call names the right tool with exactly the right argument and the
answer is exactly right. A case ends at its first wrong turn. Tool calls are measured twice: written
freely, and enforced by a grammar.

The benchmark also asks the questions of the handbook. For these questions, the tools run with the
arguments that the member writes, and only the answer counts.

The second part measures the first replies to 40 held-out cases with every form of ``tool_choice``:
which share obeys it, and which share makes exactly the right call.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from adafuse_llm.adapters.conversation import Turn, to_messages
from adafuse_llm.adapters.reply import InvalidToolCall, ReplyParser, ToolCall
from adafuse_llm.adapters.tool_grammar import tool_grammar
from adafuse_llm.embedded import final_answer, handbook_questions, member_paths
from adafuse_llm.embedded.tools import TOOLS
from training.dialogues import ARGUMENTS, Form, act, is_same_turn, turns_of
from training.world import NEEDS, AgentCase, Names, draw_agent_case

ENSEMBLE: Final = "ensemble"
MAX_NEW_TOKENS: Final = 160

ENFORCED: Final = "tool calls, enforced"
KINDS: Final = ("tool calls", ENFORCED, "ReAct")
"""The forms of `training.dialogues`, with and without a grammar."""

CHOICES: Final = ("auto", "required", *ARGUMENTS, "none")
"""The forms of ``tool_choice``: each tool by its name, too."""


def heldout_cases(n_cases: int, seed: int) -> list[AgentCase]:
    """Draw ``n_cases`` cases of the held-out split, divided equally among the needs."""
    cases = []
    for index, need in enumerate(NEEDS):
        names = Names(random.Random(f"agents {seed} {need}"), "heldout")
        wanted = (n_cases + len(NEEDS) - 1 - index) // len(NEEDS)
        cases += [draw_agent_case(names, need) for _ in range(wanted)]
    return cases


Job = tuple[str, str, AgentCase | int]  # system, kind, drawn case or number of a handbook question
ChoiceJob = tuple[str, str, bool, AgentCase]  # system, tool_choice, whether it is enforced, case
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


@cache
def _grammar(choice: str) -> str:
    return tool_grammar(TOOLS, choice=choice)


def _judge(job: Job) -> dict[str, Any]:
    """Run one case with one engine. Return whether the case succeeded, and its first wrong turn."""
    system, kind, case = job
    form: Form = "ReAct" if kind == "ReAct" else "tool calls"
    options: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS}
    if kind == ENFORCED:
        options["grammar"] = _grammar("auto")

    def reply(messages: Sequence[Mapping[str, Any]]) -> str:
        text: str = _engines[system].generate(messages=messages, **options).text
        return text

    if isinstance(case, int):
        question = handbook_questions()[case]
        answer = act(reply, form, question.question)
        row = {"need": "handbook" if question.source else "handbook, not stated"}
        row["form"] = kind
        right = answer is not None and final_answer(answer) == question.answer
        row |= {"question": question.question, "expected": question.answer}
        return row | {"system": system, "right": right, "said": answer}
    row = {"system": system, "form": kind, "need": case.need, "question": case.question}
    for number, (messages, expected) in enumerate(turns_of(case, form, TOOLS)):
        text = reply(messages)
        if not is_same_turn(text, expected, form):
            return row | {"right": False, "turn": number, "expected": expected, "said": text}
    return row | {"right": True}


def _judge_choice(job: ChoiceJob) -> dict[str, Any]:
    """Return whether the first reply to a case obeys ``tool_choice`` and makes the right call."""
    system, choice, enforced, case = job
    (messages, _), *_ = turns_of(case, "tool calls", TOOLS)
    turns: list[Turn] = [{"role": m["role"], "content": m["content"]} for m in messages[1:]]
    options: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS}
    if enforced:
        options["grammar"] = _grammar(choice)
    generation = _engines[system].generate(
        messages=to_messages(turns, tools=TOOLS, tool_choice=choice), **options
    )
    calls = read_calls(generation.text)
    expected = [(use.tool, {ARGUMENTS[use.tool]: use.argument}) for use in case.uses[:1]]
    asked = choice not in ARGUMENTS or choice == case.uses[0].tool if case.uses else False
    return {
        "system": system,
        "choice": choice,
        "enforced": enforced,
        "need": case.need,
        "question": case.question,
        "said": generation.text,
        "valid": obeys(calls, choice),
        "right": None if not asked or choice == "none" else calls == expected,
        "tokens": fmean(generation.usage.completion_tokens.values()),
        "passes": fmean(generation.usage.forward_passes.values()),
    }


Calls = list[tuple[str, dict[str, Any]]]


def read_calls(reply: str) -> Calls | None:
    """Return the names and arguments of the calls in a reply. Return None if one is malformed."""
    parser = ReplyParser(tools=True)
    parts = [*parser.feed(reply), *parser.close()]
    if any(isinstance(part, InvalidToolCall) for part in parts):
        return None
    return [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


def obeys(calls: Calls | None, choice: str) -> bool:
    """Return whether calls obey ``tool_choice``.

    All calls must be well-formed and name an existing tool with one text under the name of its
    argument. A choice by name allows exactly one call.
    """
    if calls is None:
        return False
    for name, arguments in calls:
        if list(arguments) != [ARGUMENTS.get(name)]:
            return False
        if not all(isinstance(value, str) for value in arguments.values()):
            return False
    if choice == "none":
        return not calls
    if choice in ARGUMENTS:
        return [name for name, _ in calls] == [choice]
    return bool(calls) or choice == "auto"


def _run(jobs: Sequence[Job | ChoiceJob], workers: int) -> Iterator[dict[str, Any]]:
    if workers == 1:
        _start_worker(1)
        yield from map(_run_one, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (1,)) as pool:
        yield from pool.imap_unordered(_run_one, jobs, chunksize=4)


def _run_one(job: Job | ChoiceJob) -> dict[str, Any]:
    return _judge_choice(job) if len(job) == 4 else _judge(job)


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the percentage of successful cases by form, need and system.

    The need ``all`` stands for all drawn cases.
    """
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for form in KINDS:
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


def summarize_choices(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per ``tool_choice``, with and without enforcement, and per system.

    The row has the percentage of replies that obey (``valid``), the percentage of replies that make
    exactly the right call (``right``; None if no case asks for a call), and the mean tokens and
    forward passes of a reply, per member.
    """
    groups: dict[tuple[str, bool, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["choice"], row["enforced"], row["system"]), []).append(row)
    return [
        {
            "choice": choice,
            "enforced": enforced,
            "system": system,
            "replies": len(found),
            "valid": 100 * fmean(row["valid"] for row in found),
            "right": _percentage([row["right"] for row in found if row["right"] is not None]),
            "tokens": fmean(row["tokens"] for row in found),
            "passes": fmean(row["passes"] for row in found),
        }
        for (choice, enforced, system), found in groups.items()
    ]


def _percentage(values: Sequence[bool]) -> float | None:
    return 100 * fmean(values) if values else None


def choices_as_markdown(summary: Sequence[Mapping[str, Any]]) -> str:
    """Format the results of every ``tool_choice`` as two Markdown tables."""
    systems = [*(path.name for path in member_paths()), ENSEMBLE]
    found = {(row["choice"], row["enforced"], row["system"]): row for row in summary}
    lines = []
    for title, name in (
        ("Replies that obey tool_choice, in percent: written freely / enforced", "valid"),
        (
            "Replies that make exactly the right call, in percent: written freely / enforced",
            "right",
        ),
        ("Forward passes of each member per reply: written freely / enforced", "passes"),
        ("Tokens per reply: written freely / enforced", "tokens"),
    ):
        lines += [title, "", "| tool_choice | " + " | ".join(systems) + " |", "|---|" + "---:|" * 4]
        for choice in CHOICES:
            cells = []
            for system in systems:
                pair = [found.get((choice, enforced, system)) for enforced in (False, True)]
                values = [row[name] for row in pair if row is not None]
                cells.append(" / ".join("-" if v is None else f"{v:.1f}" for v in values))
            if any(cell.strip("-/ ") for cell in cells):
                lines.append(f"| {choice} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=100, help="number of drawn cases of each form")
    parser.add_argument(
        "--choice-cases", type=int, default=40, help="number of drawn cases of each tool_choice"
    )
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
    for name in ("cases", "choice_cases", "handbook", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    from tqdm.auto import tqdm

    args = _arguments(argv)
    handbook = range(0, len(handbook_questions()), args.handbook)
    systems = (ENSEMBLE, *(path.name for path in member_paths()))
    cases = heldout_cases(args.cases, args.seed)
    jobs: list[Job | ChoiceJob] = [
        (system, kind, case) for system in systems for kind in KINDS for case in (*cases, *handbook)
    ]
    jobs += [
        (system, choice, enforced, case)
        for system in systems
        for choice in CHOICES
        for enforced in ((False, True) if choice != "none" else (False,))
        for case in heldout_cases(args.choice_cases, args.seed)
    ]
    rows = list(tqdm(_run(jobs, args.workers), total=len(jobs), unit="case"))
    by_case = [row for row in rows if "choice" not in row]
    by_choice = [row for row in rows if "choice" in row]
    success, choices = summarize(by_case), summarize_choices(by_choice)
    print(as_markdown(success))
    print(choices_as_markdown(choices))
    if args.output:
        report = {
            "settings": vars(args) | {"output": None},
            "success": success,
            "cases": by_case,
            "tool_choice": choices,
            "replies": by_choice,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
