"""The stages of training: how long and how hard the prompts are."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """How long and how hard the prompts are at some point of training (lengths in tokens).

    ``drills`` is the share of tokens spent on repeating lists: copying must be there before
    reading can be learned, and a few minutes of nothing else teach it. ``same_kind`` is how often
    all passages tell of the same kind of thing, so that only the name tells them apart.
    """

    length: int
    passages: tuple[int, ...]
    facts: tuple[int, int]
    questions: int
    drills: float = 0.0
    same_kind: float = 0.5


def stage_at(progress: float, rng: random.Random) -> Stage:
    """The stage at ``progress``: below 1 in the main part of training, 1 in the last part.

    Copying first, then short prompts, then real and some long ones. The last part has many short
    passages of one kind, where only the right one answers the question.
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
