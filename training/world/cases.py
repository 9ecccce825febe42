"""Cases: questions with exact answers, and the check of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from adafuse_llm.documents import Passage
from adafuse_llm.embedded import final_answer

Skill = Literal["people", "places_products", "numbers", "dates", "arithmetic", "not_stated"]

SKILLS: Final[tuple[Skill, ...]] = (
    "people",
    "places_products",
    "numbers",
    "dates",
    "arithmetic",
    "not_stated",
)
NOT_STATED: Final = "not stated"


@dataclass(frozen=True)
class Case:
    """A question, its exact answer, the skill it needs, and the passages it refers to."""

    question: str
    answer: str
    skill: Skill
    passages: tuple[Passage, ...] = ()


def is_correct(case: Case, text: str) -> bool:
    """Return whether an answer is exactly right. In arithmetic, only the final number counts."""
    return final_answer(text) == final_answer(case.answer)
