"""The parts of training: how many steps each has, and its learning rate."""

from __future__ import annotations

from typing import Final

from training.recipes import Recipe

DEFAULT_STEPS: Final = 2200
MAIN_SHARE: Final = 9 / 11  # of the steps; the rest is the last part
FINISH_PEAK: Final = 0.6  # learning rate of the last parts, against that of the main part
DEFAULT_AGENT_STEPS: Final = 650
SHORT_SHARE: Final = 0.3  # of the part with tools, in which they are only named


def learning_rate_factor(step: int, main: int, steps: int, end: int = 0) -> float:
    """Warm-up, a constant third, linearly to zero; twice the same from a lower peak, up to
    ``steps`` with no plateau and up to ``end``.
    """
    if step < main:
        return min((step + 1) / 40, 1.0, (main - step) / (main * 0.67))
    if step < steps:
        return FINISH_PEAK * min((step - main + 1) / 20, (steps - step) / (steps - main))
    falling = (end - step) / ((end - steps) * 0.67)
    return FINISH_PEAK * min((step - steps + 1) / 20, 1.0, falling)


def main_steps(steps: int) -> int:
    """Steps of the main part, of `steps` in the first two."""
    return round(steps * MAIN_SHARE)


def last_step(recipe: Recipe, steps: int) -> int:
    """Where the first two parts end: a member may have a main part only."""
    return main_steps(steps) if recipe.finish is None else steps
