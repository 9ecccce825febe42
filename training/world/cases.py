"""Cases: questions with exact answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from adafuse_llm.documents import Passage

Skill = Literal["people", "places_products", "numbers", "dates", "arithmetic", "not_stated"]

SKILLS: Final[tuple[Skill, ...]] = get_args(Skill)
NOT_STATED: Final = "not stated"

LongTask = Literal["parts", "summary", "reasoning"]
LONG_TASKS: Final[tuple[LongTask, ...]] = get_args(LongTask)


@dataclass(frozen=True)
class Case:
    """A question, its answer, the skill or task it belongs to, and the passages it refers to.

    The answer of a skill is exact. The answer of a task has several sentences.
    """

    question: str
    answer: str
    skill: Skill | LongTask
    passages: tuple[Passage, ...] = ()
