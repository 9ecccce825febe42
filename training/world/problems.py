"""Arithmetic: word problems and sums, with answers that show each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from training.world.cases import Case
from training.world.names import Names
from training.world.words import split_of_value, words_of

THINGS: Final = words_of(
    """apples pears eggs books coins stamps candles buttons cups nails lamps letters shells
    tickets"""
)
FIRST: Final[Mapping[str, tuple[str, ...]]] = {
    "+": (
        "{n} has {a} {t} and buys {b} more.",
        "{n} has {a} {t}. {m} gives {n} {b} more {t}.",
        "There are {a} {t} in one box and {b} {t} in another.",
        "{n} finds {a} {t} on Monday and {b} {t} on Tuesday.",
    ),
    "-": (
        "{n} has {a} {t} and gives {b} of them to {m}.",
        "A shop has {a} {t} and sells {b} of them.",
        "There are {a} {t} in a box. {n} takes {b} of them away.",
        "{n} has {a} {t} and loses {b} of them.",
    ),
    "*": (
        "{n} has {a} boxes with {b} {t} in each box.",
        "There are {a} bags. Each bag holds {b} {t}.",
        "{n} buys {b} {t} a day for {a} days.",
        "{a} people bring {b} {t} each.",
    ),
}
THEN: Final[Mapping[str, tuple[str, ...]]] = {
    "+": (
        "Then {c} more {t} arrive.",
        "Later {c} more {t} are added.",
        "Then {m} brings {c} more {t}.",
    ),
    "-": (
        "Then {c} {t} are taken away.",
        "Later {c} of the {t} break.",
        "Then {m} uses {c} of the {t}.",
    ),
}
HOW_MANY: Final = (
    "How many {t} are there now?",
    "How many {t} is that in the end?",
    "How many {t} are left at the end?",
    "What is the number of {t} now?",
)


def apply(op: str, a: int, b: int) -> int:
    """Return the result of one operation: ``+``, ``-`` or ``*``."""
    return a + b if op == "+" else a - b if op == "-" else a * b


def _draw_numbers(names: Names, two_steps: bool) -> tuple[str, str, int, int, int]:
    """Draw a problem of this split, as (first operation, second operation or "", a, b, c)."""
    rng = names.rng
    while True:
        op = rng.choice(("+", "+", "-", "-", "*"))
        then = rng.choice(("+", "-")) if two_steps else ""
        if op == "*":
            a, b = rng.randint(2, 9), rng.randint(2, 11)
        else:
            a, b = rng.randint(2, 97), rng.randint(2, 97)
        c = rng.randint(2, 97) if two_steps else 0
        middle = apply(op, a, b)
        result = apply(then, middle, c) if two_steps else middle
        if not (0 < middle < 100 and 0 < result < 100):
            continue
        if split_of_value(f"problem {op}{then}", (a * 100 + b) * 100 + c) == names.split:
            return op, then, a, b, c


def _worked_out(op: str, then: str, a: int, b: int, c: int) -> str:
    middle = result = apply(op, a, b)
    steps = [f"{a} {op} {b} = {middle}."]
    if then:
        result = apply(then, middle, c)
        steps.append(f"{middle} {then} {c} = {result}.")
    return " ".join([*steps, f"The answer is {result}."])


def draw_problem(names: Names) -> Case:
    """Draw a word problem of one or two steps; all its numbers and results are below 100."""
    names.forget()
    rng = names.rng
    op, then, a, b, c = _draw_numbers(names, rng.random() < 0.5)
    first, last = names.word("first"), names.word("first")
    values = {"a": a, "b": b, "c": c, "t": rng.choice(THINGS), "n": first, "m": last}
    patterns = [rng.choice(FIRST[op]), *([rng.choice(THEN[then])] if then else [])]
    question = " ".join([*patterns, rng.choice(HOW_MANY)]).format(**values)
    return Case(question, _worked_out(op, then, a, b, c), "arithmetic")


def draw_sum(names: Names) -> Case:
    """Draw a sum such as ``What is 12 + 7 - 4?``. Its answer looks like a word problem's."""
    rng = names.rng
    op, then, a, b, c = _draw_numbers(names, rng.random() < 0.3)
    expression = f"{a} {op} {b} {then} {c}" if then else f"{a} {op} {b}"
    question = rng.choice(("What is {}?", "{} = ?", "Work out {}.", "How much is {}?")).format(
        expression
    )
    return Case(question, _worked_out(op, then, a, b, c), "arithmetic")


def draw_sum_list(names: Names) -> Case:
    """Draw several sums in one question: ``Work out: 12 + 7; 9 * 3``, answered in order."""
    rng = names.rng
    drawn = [_draw_numbers(names, two_steps=False) for _ in range(rng.randint(3, 7))]
    expressions = "; ".join(f"{a} {op} {b}" for op, _, a, b, _ in drawn)
    worked_out = "; ".join(f"{a} {op} {b} = {apply(op, a, b)}" for op, _, a, b, _ in drawn)
    return Case(f"Work out: {expressions}", worked_out, "arithmetic")
