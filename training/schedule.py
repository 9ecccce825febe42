"""The parts of training: how many steps each one has, and its learning rate."""

from __future__ import annotations

from typing import Final

from training.recipes import Recipe

DEFAULT_STEPS: Final = 2200
MAIN_SHARE: Final = (
    9 / 11
)  # fraction of the first two parts' steps that belongs to the first, main part
FINISH_PEAK: Final = 0.6  # peak learning rate of the later parts, relative to the main part's
DEFAULT_AGENT_STEPS: Final = 650
DEFAULT_LONG_STEPS: Final = 1100
SHORT_SHARE: Final = 0.3  # until this share of the tools part, prompts only name the tools


def learning_rate_factor(step: int, main: int, steps: int, tools: int = 0, end: int = 0) -> float:
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


def main_steps(steps: int) -> int:
    """Return the number of steps in the main part, given the number in the first two parts."""
    return round(steps * MAIN_SHARE)


def last_step(recipe: Recipe, steps: int) -> int:
    """Return the step that ends the second part, or the main part if there is no second one."""
    return main_steps(steps) if recipe.finish is None else steps
