"""The recipes of the three embedded members: what each of them learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from training.world.cases import SKILLS, LongTask, Skill


@dataclass(frozen=True)
class Emphasis:
    """The share of each skill in a member's training.

    Attributes:
        mix: relative weights of the skills in questions about passages.
        arithmetic: share of all training tokens that are arithmetic problems.
        sum_lists: share of the arithmetic problems that are lists of sums.
        plain: share of prompts in the standard form without a chat template, in addition to the few
            that every part of training has.
        long_tasks: relative weights of the tasks with long answers.
        calculations: share of the questions of several parts that have a calculation.
    """

    mix: Mapping[Skill, float]
    arithmetic: float
    sum_lists: float = 0.0
    plain: float = 0.0
    long_tasks: Mapping[LongTask, float] = field(default_factory=dict)
    calculations: float = 0.0


def mix(*percents: int) -> dict[Skill, float]:
    """Return the weights of skills: people, places and products, numbers, dates, not stated."""
    skills = (each for each in SKILLS if each != "arithmetic")
    return {skill: percent / 100 for skill, percent in zip(skills, percents, strict=True)}


@dataclass(frozen=True)
class Recipe:
    """The recipe of a member. Its architecture and tokenizer are those of the shipped member.

    Attributes:
        name: name of the member.
        text_end: token that closes a plain text. The tokenizer's ``eos_token`` closes a turn.
        emphasis: emphasis of the main part of training.
        finish: emphasis of the second part of training; None if the member has no second part.
        long: emphasis of the last part, which adds long answers.
    """

    name: str
    text_end: str
    emphasis: Emphasis
    finish: Emphasis | None
    long: Emphasis


RECIPES: Final[Mapping[str, Recipe]] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="wren",
            text_end="<|endoftext|>",
            emphasis=Emphasis(mix=mix(40, 32, 8, 8, 12), arithmetic=0.06),
            finish=None,
            long=Emphasis(
                mix=mix(36, 30, 10, 10, 14),
                arithmetic=0.08,
                plain=0.2,
                long_tasks={"parts": 0.5, "summary": 0.35, "reasoning": 0.15},
                calculations=0.15,
            ),
        ),
        Recipe(
            name="heron",
            text_end="</s>",
            emphasis=Emphasis(mix=mix(10, 10, 34, 34, 12), arithmetic=0.08),
            finish=Emphasis(mix=mix(10, 10, 30, 30, 20), arithmetic=0.06),
            long=Emphasis(
                mix=mix(14, 14, 29, 29, 14),
                arithmetic=0.10,
                plain=0.2,
                long_tasks={"parts": 0.5, "summary": 0.35, "reasoning": 0.15},
                calculations=0.2,
            ),
        ),
        Recipe(
            name="finch",
            text_end="[|done|]",
            emphasis=Emphasis(mix=mix(14, 14, 14, 14, 44), arithmetic=0.30),
            finish=Emphasis(mix=mix(13, 13, 13, 13, 48), arithmetic=0.50, sum_lists=0.35),
            long=Emphasis(
                mix=mix(16, 16, 16, 16, 36),
                arithmetic=0.35,
                sum_lists=0.2,
                plain=0.2,
                long_tasks={"parts": 0.4, "summary": 0.2, "reasoning": 0.4},
                calculations=0.6,
            ),
        ),
    )
}
