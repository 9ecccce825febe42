"""Measure the skills of the embedded members, alone and as an ensemble.

    python -m benchmarks.embedded                     # the tables of docs/embedded.md
    python -m benchmarks.embedded --questions 300 --cases 40

The held-out questions of the package need one of six skills each. An answer is right if it equals
the expected one. The held-out cases of agents need the tools `look_up`, `calculate`, both or none,
as tool calls and in ReAct format. A case succeeds if every call has the right name and argument
and the answer is right. A case ends at its first wrong turn. No name, value or problem of these
questions and cases occurs in the training data.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from adafuse_llm.documents import question_messages
from adafuse_llm.embedded import final_answer, heldout_questions, member_paths
from adafuse_llm.embedded.tools import TOOLS
from training.dialogues import FORMS, Form, turns_of
from training.world.agent_cases import NEEDS, AgentCase, draw_agent_case
from training.world.names import Names

ENSEMBLE: Final = "ensemble"
SYSTEMS: Final = (*(path.name for path in member_paths()), ENSEMBLE)

Job = tuple[str, str, str, Any]
"""A table, one of its rows, the system that answers, and a question or a case."""


def heldout_cases(number: int) -> list[AgentCase]:
    """Draw held-out cases of agents, equally many for each set of tools that they need."""
    cases = []
    for index, need in enumerate(NEEDS):
        names = Names(random.Random(f"agents 1 {need}"), "heldout")
        wanted = (number + len(NEEDS) - 1 - index) // len(NEEDS)
        cases += [draw_agent_case(names, need) for _ in range(wanted)]
    return cases


def jobs(questions: int, cases: int) -> Iterator[Job]:
    """Yield every question and every case for each system."""
    for system in SYSTEMS:
        for question in heldout_questions(questions) if questions else ():
            yield "skills", question.skill, system, question
        for form in FORMS:
            for case in heldout_cases(cases):
                yield form, case.need, system, case


def judge(engines: Mapping[str, Any], job: Job) -> tuple[str, str, str, bool]:
    """Return the table, the row and the system of a job, and whether the system succeeded."""
    table, row, system, asked = job
    generate = engines[system].generate
    if table == "skills":
        prompt = question_messages(asked.question, asked.passages)
        text = generate(messages=prompt, max_new_tokens=64).text
        return table, row, system, final_answer(text) == asked.answer
    form: Form = "ReAct" if table == "ReAct" else "tool calls"
    for messages, expected in turns_of(asked, form, TOOLS):
        text = generate(messages=messages, max_new_tokens=160).text
        if meaning(text) != meaning(expected):
            return table, row, system, False
    return table, row, system, True


def meaning(turn: str) -> object:
    """Return the name and arguments of an agent's call, or its answer."""
    call = re.search(r"Action: (\w+)\nAction Input: (\{.*\})", turn)
    try:
        if call is not None:
            return call[1], json.loads(call[2])
        if (written := re.search(r"<tool_call>(.*?)</tool_call>", turn, re.DOTALL)) is not None:
            found = json.loads(written[1])
            return found["name"], found["arguments"]
    except (ValueError, LookupError, TypeError):
        return turn
    return turn.rsplit("Answer: ", 1)[-1].strip()


_engines: dict[str, Any] = {}


def _start_worker() -> None:
    import torch

    from adafuse_llm import AdaFuseEngine

    torch.set_num_threads(1)
    _engines[ENSEMBLE] = AdaFuseEngine.from_embedded()
    for path in member_paths():
        _engines[path.name] = AdaFuseEngine.from_pretrained([str(path)])


def _judge(job: Job) -> tuple[str, str, str, bool]:
    return judge(_engines, job)


def tables(results: Sequence[tuple[str, str, str, bool]]) -> str:
    """Return the percentages of successes as Markdown tables."""
    lines: list[str] = []
    for table in dict.fromkeys(each[0] for each in results):
        lines += [f"\n| {table} | {' | '.join(SYSTEMS)} |", "|---|" + "---:|" * len(SYSTEMS)]
        for row in (*dict.fromkeys(each[1] for each in results if each[0] == table), "all"):
            cells = []
            for system in SYSTEMS:
                found = [
                    right
                    for its, own, who, right in results
                    if (its, who) == (table, system) and row in (own, "all")
                ]
                cells.append(f"{100 * sum(found) / len(found):.1f}")
            lines.append(f"| {row.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and print the tables."""
    from tqdm.auto import tqdm

    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedded")
    parser.add_argument("--questions", type=int, default=1800, help="number of questions")
    parser.add_argument("--cases", type=int, default=100, help="number of agents' cases by form")
    parser.add_argument("--workers", type=int, default=2, help="processes, with one thread each")
    args = parser.parse_args(argv)
    every = list(jobs(args.questions, args.cases))
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.workers, _start_worker) as pool:
        found = pool.imap(_judge, every, chunksize=8)
        results = list(tqdm(found, total=len(every), unit="answer"))
    print(tables(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
