"""Metrics that decide whether an answer is right.

exact_match  equality after SQuAD's normalization
contains     whether the answer, such as a sentence, contains an accepted answer
number       equality of the final numbers
verbatim     equality character by character
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from adafuse_llm.embedded import final_answer
from adafuse_llm.errors import InvalidInputError, nearest

__all__ = [
    "METRICS",
    "Metric",
    "contains",
    "exact_match",
    "final_number",
    "load_metric",
    "normalize",
    "number",
    "verbatim",
]

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Apply SQuAD's normalization: lower case, no ASCII punctuation or articles, single spaces.

    A text of nothing but punctuation and articles, such as "A" or "---", keeps them, so that it
    differs from an empty answer.
    """
    plain = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join((plain if plain.strip() else text.lower()).split())


def exact_match(answer: str, accepted: Iterable[str]) -> bool:
    """Return whether an answer equals an accepted answer after normalization."""
    normal = normalize(answer)
    return any(normal == normalize(each) for each in accepted)


def contains(answer: str, accepted: Iterable[str]) -> bool:
    """Return whether an answer, such as a sentence, contains the words of an accepted answer.

    An answer with the word "or" names possibilities and is wrong, unless the accepted answer has
    this word, too. But denials ("It was not Ada Brook") and lists without "or" count as right.
    """
    text = f" {normalize(answer)} "
    found = [words for each in accepted if (words := f" {normalize(each)} ") in text]
    return any(" or " in words or " or " not in text for words in found)


def verbatim(answer: str, accepted: Iterable[str]) -> bool:
    """Return whether an answer equals an accepted answer character by character."""
    return answer in tuple(accepted)


_ANNOUNCED = re.compile(r"\\boxed\s*\{|\bthe answer is\b|####", re.IGNORECASE)
_NUMBER = re.compile(
    r"""((?<![\w).])[-\u2212])?         # a minus sign, unless it subtracts two terms
    (?:\\?[$\u20ac\u00a3\u00a5])?       # a currency sign
    ((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)""",
    re.VERBOSE,
)


def final_number(text: str) -> Decimal | None:
    r"""Return the final number of a solution, or None if the text has no number.

    If the text announces the number with "The answer is", ``####`` or ``\boxed{``, the rest of the
    line after the last announcement counts: the first number after its last "=", or else its first
    number. Without such a number, the text's last number counts. A number may have commas between
    thousands, a currency sign, decimals and a minus sign. Fractions are not supported.
    """
    text = text.replace("{,}", ",")
    announced = list(_ANNOUNCED.finditer(text))
    if announced:
        line = text[announced[-1].end() :].lstrip(" \t\n:*").partition("\n")[0]
        numbers = _numbers(line.rpartition("=")[2]) or _numbers(line)
        if numbers:
            return numbers[0]
    return next(reversed(_numbers(text)), None)


def _numbers(text: str) -> list[Decimal]:
    return [
        Decimal(digits.replace(",", "")) * (-1 if minus else 1)
        for minus, digits in _NUMBER.findall(text)
    ]


def number(answer: str, accepted: Iterable[str]) -> bool:
    """Return whether the final number of an answer equals that of an accepted answer."""
    value = final_number(answer)
    return value is not None and any(value == final_number(each) for each in accepted)


def first_line(text: str) -> str:
    """Return the first line that is not blank. Base models go on after it with other text."""
    return next(iter(text.strip().splitlines()), "").strip()


@dataclass(frozen=True)
class Metric:
    """How to read the answer from a response without reasoning, and how to judge the answer."""

    read: Callable[[str], str]
    is_right: Callable[[str, Sequence[str]], bool]


METRICS: Mapping[str, Metric] = {
    "exact_match": Metric(first_line, exact_match),
    "contains": Metric(first_line, contains),
    "number": Metric(str, number),
    "verbatim": Metric(final_answer, verbatim),
}
"""The metrics, by name."""


def load_metric(name: str) -> Metric:
    """Return the metric `name`, or raise `InvalidInputError`."""
    if name not in METRICS:
        raise InvalidInputError(
            f"there is no metric {name!r}.{nearest(name, METRICS)} Metrics: {', '.join(METRICS)}."
        )
    return METRICS[name]
