"""Write the held-out questions of the package: ``python -m training.freeze``.

`adafuse_llm.embedded.heldout_questions` reads them. With another seed, `draw_questions` draws other
questions, for example for development.
"""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import count, islice

from adafuse_llm.embedded import HELDOUT, HeldoutQuestion, final_answer
from training.world import SKILLS, Case, Names, Skill, draw_case

SEED = 1
PASSAGES = 3
QUESTIONS = 300 * len(SKILLS)


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


def as_lines(questions: Iterable[HeldoutQuestion]) -> bytes:
    """Return questions as JSON Lines."""
    lines = (json.dumps(asdict(question), ensure_ascii=False) + "\n" for question in questions)
    return "".join(lines).encode()


def main() -> None:
    """Write the file of held-out questions."""
    packed = io.BytesIO()
    # Without a file name and time, the compressed bytes are the same in every run.
    with gzip.GzipFile("", "wb", 9, packed, mtime=0) as file:
        file.write(as_lines(islice(draw_questions(), QUESTIONS)))
    HELDOUT.write_bytes(packed.getvalue())


if __name__ == "__main__":
    main()
