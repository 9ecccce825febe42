"""Write the held-out questions of the package: ``python -m training.freeze``.

`adafuse_llm.embedded.heldout_questions` reads them. With another seed, `draw_questions` and
`draw_long_questions` draw other questions, for example for development.
"""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from adafuse_llm.embedded import (
    HELDOUT,
    HELDOUT_KINDS,
    HELDOUT_LONG,
    HeldoutKind,
    HeldoutQuestion,
    final_answer,
)
from training.world import (
    LONG_TASKS,
    SKILLS,
    Case,
    Names,
    Skill,
    draw_case,
    draw_long_case,
)

SEED = 1
PASSAGES = 3
QUESTIONS = 300 * len(SKILLS)
LONG_QUESTIONS = 300
"""Number of questions of each kind with long answers."""


def draw_questions(seed: int = SEED, n_passages: int = PASSAGES) -> Iterator[HeldoutQuestion]:
    """Draw held-out questions without end. The skills take turns.

    Names, values and problems come from the held-out split and do not occur in the training data.
    Question n does not depend on the number of questions that are drawn.

    Args:
        seed: seed of the random choices.
        n_passages: number of passages for each question about passages.
    """
    drawn = [_cases(seed, skill, n_passages) for skill in SKILLS]
    for number in count():
        case = next(drawn[number % len(SKILLS)])
        answer = final_answer(case.answer)
        yield HeldoutQuestion(case.question, answer, case.skill, case.passages)


def _cases(seed: int, skill: Skill, n_passages: int) -> Iterator[Case]:
    names = Names(random.Random(f"benchmark {seed} {skill}"), "heldout")
    while True:
        yield draw_case(names, skill, n_passages)


def draw_long_questions(
    kind: HeldoutKind, seed: int = SEED, n_passages: int = PASSAGES
) -> Iterator[HeldoutQuestion]:
    """Draw held-out questions of a kind other than ``facts``, without end.

    Their answers are whole texts. The kind ``plain`` has the six skills and the kinds with long
    answers in turn.

    Args:
        kind: the kind.
        seed: seed of the random choices.
        n_passages: number of passages for each question about passages.
    """
    draws: list[Callable[[Names], Case]] = [
        partial(draw_long_case, task=task, n_passages=n_passages)
        for task in LONG_TASKS
        if kind in (task, "plain")
    ]
    if kind == "plain":
        draws += [partial(draw_case, skill=skill, n_passages=n_passages) for skill in SKILLS]
    names = Names(random.Random(f"benchmark {seed} {kind}"), "heldout")
    while True:
        for draw in draws:
            case = draw(names)
            yield HeldoutQuestion(case.question, case.answer, case.skill, case.passages)


def as_lines(questions: Iterable[HeldoutQuestion], **more: Any) -> bytes:
    """Return questions as JSON Lines, each with the fields `more` before its own."""
    lines = (json.dumps(more | asdict(each), ensure_ascii=False) + "\n" for each in questions)
    return "".join(lines).encode()


def main() -> None:
    """Write the files of held-out questions."""
    _write(HELDOUT, as_lines(islice(draw_questions(), QUESTIONS)))
    long = [
        as_lines(islice(draw_long_questions(kind), LONG_QUESTIONS), kind=kind)
        for kind in HELDOUT_KINDS
        if kind != "facts"
    ]
    _write(HELDOUT_LONG, b"".join(long))


def _write(path: Path, content: bytes) -> None:
    packed = io.BytesIO()
    # Without a file name and time, the compressed bytes are the same in every run.
    with gzip.GzipFile("", "wb", 9, packed, mtime=0) as file:
        file.write(content)
    path.write_bytes(packed.getvalue())


if __name__ == "__main__":
    main()
