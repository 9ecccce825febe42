"""The held-out questions that ship with the package, and how replies to them are read."""

from collections import Counter

import pytest

from adafuse_llm.embedded import final_answer, heldout_questions

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
    assert heldout_questions(7) == questions[:7]
    for each in questions[:60]:
        assert len(each.passages) == (0 if each.skill == "arithmetic" else 3)
        text = " ".join(passage.text for passage in each.passages)
        assert (each.answer in text) == (each.skill not in {"arithmetic", "not_stated"})
