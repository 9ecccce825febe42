"""How an answer is compared with the accepted ones. Scores are percentages.

    exact_match     equal after SQuAD's normalisation
    f1              overlap of words after the same normalisation
    verbatim        equal, character by character
    number          the final numbers are equal
    lenient_match   the paper's match: some of the words are enough
    lenient_number  the paper's match of numbers: some of the digits are enough
    spbleu, chrf    sacrebleu's, over the whole test set

The two lenient ones are there for comparison with the paper's tables. They count "war" for "World
War I" and 3 for 13, so nothing is concluded from them here.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adafuse_llm.errors import InvalidInputError, MissingDependencyError, nearest

__all__ = [
    "exact_match",
    "f1",
    "final_number",
    "lenient_match",
    "lenient_number",
    "load_metric",
    "normalize",
    "number",
]

Statistics = tuple[float, ...]
"""What a metric keeps of one answer. Of many answers it needs only the sums."""

Sums = Sequence[float] | NDArray[np.float64]


class Metric(Protocol):
    """A score of many answers that follows from sums over them.

    Attributes:
        name: as in `METRICS`.
        binary: whether every answer is right or wrong.
    """

    @property
    def name(self) -> str: ...

    @property
    def binary(self) -> bool: ...

    def statistics(self, prediction: str, accepted: Sequence[str]) -> Statistics:
        """What counts of one answer; every answer has as many numbers."""
        ...

    def score(self, sums: Sums) -> float:
        """The score in percent of answers whose statistics have these sums."""
        ...


# One answer -----------------------------------------------------------------------------------

_PUNCTUATION = str.maketrans("", "", string.punctuation)

FUNCTION_WORDS = frozenset(
    "a about an and are as at be because been but by can could did do does for from had has have "  # noqa: SIM905
    "how if in is may might must of on or shall should so than that the then to was were what when "
    "where which while who whom whose why will with would".split()
)
"""Words that the lenient match does not look at."""

SLACK = 1
"""Words by which answers of three words and more may differ in length for the lenient match."""


def normalize(text: str) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single spaces."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def _normal(text: str) -> str:
    """The same; where nothing is left ("A", "---"), the text in lower case, so that it is not taken
    for an empty answer.
    """
    return normalize(text) or " ".join(text.lower().split())


def exact_match(prediction: str, accepted: Iterable[str]) -> bool:
    """Whether an answer equals an accepted one, both normalised. Where normalisation leaves nothing
    of a text, as of "A" or "---", the text itself is compared.
    """
    found = _normal(prediction)
    return any(found == _normal(each) for each in accepted)


def f1(prediction: str, accepted: Iterable[str]) -> float:
    """Harmonic mean of precision and recall of the words of an answer, both normalised as for
    `exact_match`; the best over the accepted ones, from 0 to 1. Two empty answers agree.
    """
    return max((_overlap(_normal(prediction), _normal(each)) for each in accepted), default=0.0)


def _overlap(left: str, right: str) -> float:
    ours, theirs = left.split(), right.split()
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def verbatim(prediction: str, accepted: Iterable[str]) -> bool:
    """Whether an answer is an accepted one, character by character."""
    return prediction in tuple(accepted)


def lenient_match(prediction: str, accepted: Iterable[str]) -> bool:
    """The paper's match: some of the words are enough.

    Lower case, ASCII punctuation and `FUNCTION_WORDS` removed (unless that leaves nothing, as of
    "The Who"), an answer is accepted if it is equal to an accepted one, or if every word of the
    shorter of the two occurs in the longer, unless the shorter has three words or more and the
    lengths differ by more than `SLACK`. So "war" counts for "World War I", and so does "the war of
    the worlds".

    The authors' scripts differ from each other (which words are dropped, a slack of 5 for SQuAD)
    and take numbers in words for their digits and plurals for singulars in some; none of that is
    done here.
    """
    return any(_lenient(_content(prediction), _content(each)) for each in accepted)


def _content(text: str) -> list[str]:
    words = text.lower().translate(_PUNCTUATION).split()
    return [word for word in words if word not in FUNCTION_WORDS] or text.lower().split()


def _lenient(left: list[str], right: list[str]) -> bool:
    short, long = sorted((left, right), key=len)
    if not short or (len(short) >= 3 and len(long) - len(short) > SLACK):
        return left == right
    return set(short) <= set(long)


_ANNOUNCED = re.compile(r"\\boxed\s*\{|\bthe answer is\b|####", re.IGNORECASE)
_NUMBER = re.compile(
    r"""((?<![\w).])[-\u2212])?         # a minus, not between the terms of a difference
    (?:\\?[$\u20ac\u00a3\u00a5])?       # a currency
    ((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)""",
    re.VERBOSE,
)


def final_number(text: str) -> Decimal | None:
    r"""The number that a solution ends with; None if there is none.

    Where the text announces it ("The answer is", ``####`` or ``\boxed{``; the last of them), it is
    the first number after that, or after the last "=" in the same line. Otherwise, and where no
    number follows, it is the last number of the text. Commas between thousands, a currency sign,
    decimals and a minus belong to the number; fractions are not understood.
    """
    text = text.replace("{,}", ",")
    announced = list(_ANNOUNCED.finditer(text))
    if announced:
        line = text[announced[-1].end() :].lstrip(" \t\n:*").partition("\n")[0]
        found = _numbers(line.rpartition("=")[2]) or _numbers(line)
        if found:
            return found[0]
    return next(reversed(_numbers(text)), None)


def _numbers(text: str) -> list[Decimal]:
    return [
        Decimal(digits.replace(",", "")) * (-1 if minus else 1)
        for minus, digits in _NUMBER.findall(text)
    ]


def number(prediction: str, accepted: Iterable[str]) -> bool:
    """Whether the final numbers are equal (GSM8K)."""
    found = final_number(prediction)
    return found is not None and any(found == final_number(each) for each in accepted)


def lenient_number(prediction: str, accepted: Iterable[str]) -> bool:
    """The paper's match of numbers: with two decimals and without sign, the digits of one are part
    of the other's, so that 3 counts for 13.
    """
    found = _digits(prediction)
    others = [_digits(each) for each in accepted]
    return bool(found) and any(each and (found in each or each in found) for each in others)


def _digits(text: str) -> str:
    found = final_number(text)
    return "" if found is None else f"{abs(found):.2f}"


# Many answers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanMetric:
    """The mean over all answers."""

    name: str
    value: Callable[[str, Sequence[str]], float]
    binary: bool = True

    def statistics(self, prediction: str, accepted: Sequence[str]) -> Statistics:
        """The value, and 1."""
        return float(self.value(prediction, accepted)), 1.0

    def score(self, sums: Sums) -> float:
        """Mean in percent."""
        return float(100.0 * sums[0] / sums[1])


@dataclass(frozen=True)
class CorpusMetric:
    """A metric of sacrebleu: n-gram counts, summed over the test set."""

    name: str
    scorer: Any
    binary: bool = False

    def statistics(self, prediction: str, accepted: Sequence[str]) -> Statistics:
        """The counts; each accepted answer is a reference."""
        references = [[each] for each in accepted]
        (counts,) = self.scorer._extract_corpus_statistics([prediction], references)
        return tuple(map(float, counts))

    def score(self, sums: Sums) -> float:
        """What sacrebleu's ``corpus_score`` is."""
        return float(self.scorer._compute_score_from_stats([int(each) for each in sums]).score)


def _chrf() -> Metric:
    return CorpusMetric("chrf", _sacrebleu().CHRF())


def _spbleu() -> Metric:
    metrics = _sacrebleu()
    try:
        return CorpusMetric("spbleu", metrics.BLEU(tokenize=SPBLEU_TOKENIZER, force=True))
    except (Exception, SystemExit) as error:  # sacrebleu exits where a certificate is wrong
        from sacrebleu.tokenizers import tokenizer_spm
        from sacrebleu.utils import SACREBLEU_DIR

        url = tokenizer_spm.SPM_MODELS[SPBLEU_TOKENIZER]["url"]
        raise MissingDependencyError(
            "spBLEU cuts text with a SentencePiece file that sacrebleu fetches when it is first "
            f"needed, and it could not be had ({type(error).__name__}: {error}). Put {url} into "
            f"{SACREBLEU_DIR}/models/, or leave it out with --metric chrf."
        ) from error


SPBLEU_TOKENIZER = "flores101"
"""sacrebleu's name for the tokenizer of spBLEU; the paper's "spm" is the same."""


def _sacrebleu() -> Any:
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise MissingDependencyError(
            'spBLEU and chrF need sacrebleu: pip install "adafuse-llm[eval]"'
        ) from error
    return metrics


METRICS: Mapping[str, Callable[[], Metric]] = {
    "exact_match": lambda: MeanMetric("exact_match", exact_match),
    "f1": lambda: MeanMetric("f1", f1, binary=False),
    "verbatim": lambda: MeanMetric("verbatim", verbatim),
    "number": lambda: MeanMetric("number", number),
    "lenient_match": lambda: MeanMetric("lenient_match", lenient_match),
    "lenient_number": lambda: MeanMetric("lenient_number", lenient_number),
    "spbleu": _spbleu,
    "chrf": _chrf,
}


def load_metric(name: str) -> Metric:
    """A metric by its name.

    Raises:
        InvalidInputError: there is none of that name.
        MissingDependencyError: it needs a package or a file that is not there.
    """
    if name not in METRICS:
        raise InvalidInputError(
            f"there is no metric {name!r}.{nearest(name, METRICS)} Metrics: {', '.join(METRICS)}."
        )
    return METRICS[name]()
