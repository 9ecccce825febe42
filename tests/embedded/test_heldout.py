"""The held-out questions that ship with the package, and how replies to them are read."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.documents import Passage
from adafuse_llm.embedded import (
    HELDOUT_KINDS,
    HeldoutKind,
    final_answer,
    heldout_questions,
)

_SKILLS = ("people", "places_products", "numbers", "dates", "arithmetic", "not_stated")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12 + 7 = 19. The answer is 19.", "19"),
        (" Maren Tolvik.\n", "Maren Tolvik"),
        ("4.35 crowns", "4.35 crowns"),
        ("not stated", "not stated"),
    ],
)
def test_final_answer_takes_the_answer_proper(text: str, expected: str) -> None:
    assert final_answer(text) == expected


@pytest.mark.quick
def test_there_are_300_questions_of_each_skill_in_turn() -> None:
    questions = heldout_questions()
    skills = [each.skill for each in questions]
    assert Counter(skills) == dict.fromkeys(skills[:6], 300)
    assert skills == skills[:6] * 300
    assert len(set(questions)) == 1800


def test_reading_questions_come_with_three_passages_and_sums_with_none() -> None:
    for each in heldout_questions(60):
        assert len(each.passages) == (0 if each.skill == "arithmetic" else 3)
        assert all(isinstance(passage, Passage) for passage in each.passages)
        text = " ".join(passage.text for passage in each.passages)
        assert (each.answer in text) == (each.skill not in {"arithmetic", "not_stated"})


@pytest.mark.quick
@pytest.mark.parametrize("kind", HELDOUT_KINDS[1:])
def test_there_are_300_questions_of_each_kind_with_long_answers(kind: HeldoutKind) -> None:
    questions = heldout_questions(kind=kind)
    assert len(set(questions)) == 300
    skills = {each.skill for each in questions}
    assert skills == ({kind} if kind != "plain" else {*HELDOUT_KINDS[1:4], *_SKILLS})
    assert heldout_questions(7, kind) == questions[:7]


def test_an_unknown_kind_is_an_error_that_names_the_kinds() -> None:
    with pytest.raises(InvalidInputError, match=r"Did you mean 'summary'.* Kinds: facts, parts"):
        heldout_questions(kind="sumary")  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, -1, 1801])
def test_a_limit_that_cannot_be_is_an_error_with_the_number_of_questions(limit: int) -> None:
    message = f"has 1800 held-out questions; got a limit of {limit}. Use a limit from 1 to 1800"
    with pytest.raises(InvalidInputError, match=message):
        heldout_questions(limit)


def test_nothing_that_makes_the_members_is_imported() -> None:
    code = (
        "import sys; from adafuse_llm.evaluation.tuning import embedded_questions; "
        "embedded_questions(); print([m for m in sys.modules if m in "
        "('training', 'benchmarks', 'tests')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
