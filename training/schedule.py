"""The parts of training: the number of steps in each, and its learning rate."""

from __future__ import annotations

from typing import Final

from training.recipes import Recipe

DEFAULT_STEPS: Final = 2200
MAIN_SHARE: Final = 9 / 11  # share of the main part in the steps of the first two parts
FINISH_PEAK: Final = 0.6  # peak learning rate of the later parts, relative to the main part
DEFAULT_AGENT_STEPS: Final = 650
SHORT_SHARE: Final = 0.3  # share of the tools part in which prompts only name the tools


def learning_rate_factor(step: int, main: int, steps: int, end: int = 0) -> float:
    """Return the factor of the learning rate at a step.

    In the main part, up to step ``main``, the rate warms up, stays constant for a third, and falls
    linearly to zero. The second part, up to ``steps``, and the tools part, up to ``end``, repeat
    this from a lower peak; the second part has no plateau.
    """
    if step < main:
        return min((step + 1) / 40, 1.0, (main - step) / (main * 0.67))
    if step < steps:
        return FINISH_PEAK * min((step - main + 1) / 20, (steps - step) / (steps - main))
    falling = (end - step) / ((end - steps) * 0.67)
    return FINISH_PEAK * min((step - steps + 1) / 20, 1.0, falling)


def main_steps(steps: int) -> int:
    """Return the steps of the main part, given the ``steps`` of the first two parts."""
    return round(steps * MAIN_SHARE)


def last_step(recipe: Recipe, steps: int) -> int:
    """Return the step at which the first two parts end; some members have a main part only."""
    return main_steps(steps) if recipe.finish is None else steps
