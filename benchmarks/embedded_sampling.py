"""Right answers of the embedded members and of their ensemble at several temperatures.

    python benchmarks/embedded_sampling.py                  # 34 questions per skill, 204 in all
    python benchmarks/embedded_sampling.py --per-skill 50 --temperatures 0 1 --output sampling.json

Every member alone and the ensemble answer the questions at each temperature. Question i has the
seed i. The ensemble also answers with noise of its members' own, which members at the same text do
not share; this is not an option of the engine, and shows what sharing changes. The table has the
share of right answers, the share of unanimous rounds, and the forward passes per committed token,
both counted over all members.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

from adafuse_llm import AdaFuseEngine, Generation
from adafuse_llm.decoding.member import Member
from adafuse_llm.embedded import heldout_questions, member_paths
from adafuse_llm.sampling import Draw, text_hash
from adafuse_llm.summary import Summary
from adafuse_llm.tree import Node
from benchmarks.paper.metrics import verbatim
from benchmarks.paper.tasks import TASKS, Question
from training.world import SKILLS

ENSEMBLE: Final = "ensemble"
OWN_NOISE: Final = "ensemble, noise not shared"
TASK: Final = TASKS["embedded"]
THREADS: Final = 16


@contextmanager
def noise_of_their_own() -> Iterator[None]:
    """Make the noise of a token depend on the member, too."""
    shared = Member._draw

    def own(member: Member, node: Node) -> Draw | None:
        draw = shared(member, node)
        return draw and replace(draw, key=draw.key ^ text_hash(member.name))

    with mock.patch.object(Member, "_draw", own):
        yield


def answers(
    engine: AdaFuseEngine, questions: Sequence[Question], temperature: float
) -> list[Generation]:
    """Return the responses to all questions."""

    def answer(numbered: tuple[int, Question]) -> Generation:
        number, question = numbered
        request = TASK.request(question, TASK.header, TASK.form)
        options: dict[str, Any] = {**TASK.options, "temperature": temperature, "seed": number}
        return engine.generate(**request, **options)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(answer, enumerate(questions)))


def measured(questions: Sequence[Question], given: Sequence[Generation]) -> dict[str, float]:
    """Return the figures of one row of the table."""
    right = [
        verbatim(TASK.read(generation.text), question.accepted)
        for question, generation in zip(questions, given, strict=True)
    ]
    passes = sum(sum(each.usage.forward_passes.values()) for each in given)
    tokens = sum(sum(each.usage.completion_tokens.values()) for each in given)
    agreement = Summary.of([played for each in given for played in each.rounds]).agreement
    return {
        "right": sum(right) / len(right),
        "unanimous": agreement or 0.0,
        "passes_per_token": passes / tokens,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row per system and temperature."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-skill", type=int, default=34)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.5, 1.0, 1.5])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    heldout = heldout_questions(given.per_skill * len(SKILLS))
    questions = [Question.from_heldout(number, each) for number, each in enumerate(heldout, 1)]
    paths = [str(path) for path in member_paths()]
    engines = {Path(path).name: AdaFuseEngine.from_pretrained([path]) for path in paths}
    engines[ENSEMBLE] = AdaFuseEngine.from_pretrained(paths)
    rows: list[dict[str, Any]] = []

    def run(name: str, engine: AdaFuseEngine, temperature: float) -> None:
        figures = measured(questions, answers(engine, questions, temperature))
        rows.append({"system": name, "temperature": temperature, **figures})
        print(
            f"T = {temperature:g}  {name}: right {100 * figures['right']:.1f} %, unanimous "
            f"{100 * figures['unanimous']:.1f} %, {figures['passes_per_token']:.2f} passes per "
            "token",
            flush=True,
        )

    print(f"{len(questions)} questions")
    for temperature in given.temperatures:
        for name, engine in engines.items():
            run(name, engine, temperature)
        if temperature:
            with noise_of_their_own():
                run(OWN_NOISE, engines[ENSEMBLE], temperature)
    if given.output:
        record = {"arguments": vars(given) | {"output": None}, "rows": rows}
        given.output.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
