"""The parts of training: their steps, learning rates, and the difficulty of their prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

STEPS: Final = 2200
MAIN_SHARE: Final = 9 / 11  # of the steps of the first two parts
FINISH_PEAK: Final = 0.6  # peak learning rate of the later parts, relative to the main part's
AGENT_STEPS: Final = 650
LONG_STEPS: Final = 1100
SHORT_SHARE: Final = 0.3  # until this share of the tools part, prompts only name the tools


def learning_rate_factor(step: int, main: int, steps: int, tools: int, end: int) -> float:
    """Return the factor that scales the learning rate at a step.

    In the main part, up to step ``main``, the factor rises, stays constant until a third of the
    part is over, and falls linearly to zero. It does the same in the tools part, from step
    ``steps`` to step ``tools``, and in the part with long answers, from there to step ``end``, with
    a lower peak. In the second part, up to step ``steps``, it falls immediately after it has
    reached this lower peak.
    """
    if step < main:
        return min((step + 1) / 40, 1.0, (main - step) / (main * 0.67))
    if step < steps:
        return FINISH_PEAK * min((step - main + 1) / 20, (steps - step) / (steps - main))
    first, last = (steps, tools) if step < tools else (tools, end)
    falling = (last - step) / ((last - first) * 0.67)
    return FINISH_PEAK * min((step - first + 1) / 20, 1.0, falling)


@dataclass(frozen=True)
class Stage:
    """The length and difficulty of the prompts at some point of training.

    Attributes:
        length: tokens in a row.
        passages: possible numbers of passages in a prompt.
        facts: lowest and highest number of facts in a passage.
        questions: number of questions about the same passages.
        drills: share of tokens in drills, which are lists to repeat. A model has to learn to copy
            before it can learn to read. It learns to copy in a few minutes of drills alone.
        same_kind: probability that all passages are about the same kind of entity, so that only the
            names distinguish them.
    """

    length: int
    passages: tuple[int, ...]
    facts: tuple[int, int]
    questions: int
    drills: float = 0.0
    same_kind: float = 0.5


def long_stage(rng: random.Random) -> Stage:
    """Draw a stage of the part of training that adds long answers."""
    if rng.random() < 0.04:
        return Stage(1536, (6, 8), (2, 6), 8)
    return Stage(1024, (1, 2, 3, 3, 3, 4), (2, 6), 5)


def stage_at(progress: float, rng: random.Random) -> Stage:
    """Draw the stage at ``progress``, which is below 1 in the main part and 1 afterwards.

    The main part begins with drills, continues with short prompts, and ends with prompts of full
    length and a few longer ones. After the main part, many prompts hold several short passages
    about the same kind of entity, and only one of these passages answers the question.
    """
    if progress >= 1.0:
        chance = rng.random()
        if chance < 0.04:
            return Stage(1536, (8, 10, 12), (2, 6), 20)
        if chance < 0.55:
            return Stage(512, (2, 3, 3, 4), (1, 4), 12, same_kind=0.7)
        return Stage(640, (1, 2, 3, 3, 4), (2, 6), 14, same_kind=0.6)
    if progress < 0.10:
        return Stage(256, (1,), (2, 3), 6, drills=1.0)
    if progress < 0.17:
        return Stage(256, (1,), (2, 4), 6, drills=0.3)
    if progress < 0.28:
        return Stage(384, (1, 2), (2, 5), 8, drills=0.1)
    if progress > 0.6 and rng.random() < 0.04:
        return Stage(1536, (8, 10, 12), (2, 6), 14)
    if progress < 0.55:
        return Stage(512, (1, 2, 3), (2, 6), 9)
    return Stage(640, (1, 2, 3, 3, 4), (2, 6), 9)
