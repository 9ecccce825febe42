"""Answers of the embedded members to questions with options: written freely, grown, or chosen.

    python benchmarks/embedded_choices.py                     # 25 questions per skill, 12 options
    python benchmarks/embedded_choices.py --per-skill 50 --options 4 --output choices.json

Every question has its right answer and wrong answers, which are right answers to other questions of
the same skill. The members do not read the options. The ensemble, and every member alone, answers
each question in three ways:

* freely: the response has any form; it is right if it is an accepted answer
* grown: the response is one of the options, written word by word under a regular expression
* chosen: the response is the likeliest option (``choices``)

The questions are those of ``benchmarks/embedded_skills.py``, except for skills with too few
different answers. In its free answers to arithmetic questions, a member writes the calculation
first; when it chooses, it writes nothing. A McNemar test compares the chosen with the free answers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from adafuse_llm import AdaFuseEngine
from adafuse_llm.embedded import heldout_questions, member_paths
from benchmarks.paper.metrics import verbatim
from benchmarks.paper.statistics import mcnemar, p_value
from benchmarks.paper.tasks import TASKS, Question
from training.world import SKILLS

ENSEMBLE: Final = "ensemble"
WAYS: Final = ("freely", "grown", "chosen")
TASK: Final = TASKS["embedded"]


def with_options(
    questions: Sequence[Question], count: int, seed: int
) -> list[tuple[Question, list[str]]]:
    """Return the questions, each with `count` options in random order, one of which is right.

    Questions of skills with fewer different answers are left out.
    """
    drawn = random.Random(seed)
    paired = []
    for question in questions:
        right = question.accepted[0]
        wrong = sorted(
            {
                other.accepted[0]
                for other in questions
                if other.group == question.group
                and not verbatim(other.accepted[0], question.accepted)
            }
        )
        if len(wrong) < count - 1:
            continue
        options = [right, *drawn.sample(wrong, count - 1)]
        drawn.shuffle(options)
        paired.append((question, options))
    return paired


def answer(engine: AdaFuseEngine, question: Question, options: Sequence[str]) -> dict[str, bool]:
    """Return for each way whether the answer is right."""
    request = TASK.request(question, TASK.header, TASK.form)
    expression = "|".join(re.escape(option) for option in options)
    texts = {
        "freely": TASK.read(engine.generate(**request, **TASK.options).text),
        "grown": engine.generate(**request, regex=expression).text,
        "chosen": engine.generate(**request, choices=options).text,
    }
    return {way: verbatim(texts[way], question.accepted) for way in WAYS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the share of right answers by system and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-skill", type=int, default=25)
    parser.add_argument("--options", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    heldout = heldout_questions(given.per_skill * len(SKILLS))
    questions = [Question.from_heldout(number, each) for number, each in enumerate(heldout, 1)]
    paired = with_options(questions, given.options, given.seed)
    paths = [str(path) for path in member_paths()]
    engines = {Path(path).name: AdaFuseEngine.from_pretrained([path]) for path in paths}
    engines[ENSEMBLE] = AdaFuseEngine.from_pretrained(paths)
    print(f"{len(paired)} questions with {given.options} options")
    rows: dict[str, list[dict[str, bool]]] = {}
    for name, engine in engines.items():
        rows[name] = [answer(engine, question, options) for question, options in paired]
        print(f"{name}: {report(rows[name])}", flush=True)
        for skill in dict.fromkeys(question.group for question, _ in paired):
            of_skill = zip(paired, rows[name], strict=True)
            print(f"  {skill}: {report([row for (q, _), row in of_skill if q.group == skill])}")
        read = [r for (q, _), r in zip(paired, rows[name], strict=True) if q.group != "arithmetic"]
        print(f"  all but arithmetic: {report(read)}", flush=True)
    if given.output:
        record: dict[str, Any] = {"arguments": vars(given) | {"output": None}, "rows": rows}
        given.output.write_text(json.dumps(record, indent=1), encoding="utf-8")


def report(rows: Sequence[dict[str, bool]]) -> str:
    """Return the share of right answers of each way in percent, and the p-value."""
    shares = [f"{way} {100 * sum(row[way] for row in rows) / len(rows):.1f} %" for way in WAYS]
    test = mcnemar([row["chosen"] for row in rows], [row["freely"] for row in rows])
    return f"{', '.join(shares)}; p-value of chosen against freely {p_value(test)}"


if __name__ == "__main__":
    main()
