"""The held-out questions that ship with the package, and how replies to them are read."""

from collections import Counter

import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.embedded import HELDOUT_KINDS, final_answer, heldout_questions

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12 + 7 = 19. The answer is 19.", "19"),
        (" Maren Tolvik.\n", "Maren Tolvik"),
        ("4.35 crowns", "4.35 crowns"),
    ],
)
def test_final_answer_takes_the_answer_proper(text: str, expected: str) -> None:
    assert final_answer(text) == expected


def test_the_skills_take_turns_and_passages_hold_the_answers() -> None:
    questions = heldout_questions()
    skills = [each.skill for each in questions]
    assert Counter(skills) == dict.fromkeys(skills[:6], 300)
    assert skills == skills[:6] * 300
    assert len(set(questions)) == 1800
    for each in questions[:60]:
        assert len(each.passages) == (0 if each.skill == "arithmetic" else 3)
        text = " ".join(passage.text for passage in each.passages)
        assert (each.answer in text) == (each.skill not in {"arithmetic", "not_stated"})


def test_there_are_300_questions_of_each_kind_with_long_answers() -> None:
    for kind in HELDOUT_KINDS[1:]:
        questions = heldout_questions(kind=kind)
        assert len(set(questions)) == 300
        assert kind == "plain" or {each.skill for each in questions} == {kind}
        assert heldout_questions(7, kind) == questions[:7]


def test_an_unknown_kind_and_an_impossible_limit_are_errors() -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'summary'"):
        heldout_questions(kind="sumary")  # type: ignore[arg-type]
    for limit in (0, 1801):
        with pytest.raises(InvalidInputError, match="from 1 to 1800"):
            heldout_questions(limit)
