"""Metrics of the paper's tables. Scores are percentages.

    exact_match, contains, verbatim, number   right or wrong (`adafuse_llm.evaluation.metrics`)
    f1              overlap of words after SQuAD's normalization
    sentences       share of the accepted answer's sentences that the answer has
    sentence_f1     overlap of the sentences of both answers
    lenient_match   the paper's match, which accepts answers with only some of the words
    lenient_number  the paper's match of numbers, which accepts only some of the digits
    spbleu, chrf    sacrebleu's metrics over the whole test set

The two lenient metrics allow a comparison with the paper's tables. They accept "war" for "World War
I" and 3 for 13, so this project draws no conclusions from them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adafuse_llm.errors import InvalidInputError, nearest
from adafuse_llm.evaluation.metrics import (
    contains,
    exact_match,
    final_number,
    normalize,
    number,
    verbatim,
)

Statistics = tuple[float, ...]
"""The numbers that a metric computes for one answer. The score of many answers depends only on
the sums of these numbers over the answers."""

Sums = Sequence[float] | NDArray[np.float64]


class Metric(Protocol):
    """A score of many answers, computed from the sums of their statistics.

    Attributes:
        name: the metric's name in `METRICS`.
        binary: whether every answer is either right or wrong.
    """

    @property
    def name(self) -> str: ...

    @property
    def binary(self) -> bool: ...

    def statistics(self, prediction: str, accepted: Sequence[str]) -> Statistics:
        """Return the statistics of one answer. Every answer has the same number of them."""
        ...

    def score(self, sums: Sums) -> float:
        """Return the score in percent, given the sums of the answers' statistics."""
        ...


FUNCTION_WORDS = frozenset(
    "a about an and are as at be because been but by can could did do does for from had has have "  # noqa: SIM905
    "how if in is may might must of on or shall should so than that the then to was were what when "
    "where which while who whom whose why will with would".split()
)
"""Words that the lenient match ignores."""

SLACK = 1
"""Maximum difference in words between the lengths of texts that match leniently. The limit applies
if the shorter text has three words or more."""


def f1(prediction: str, accepted: Iterable[str]) -> float:
    """Return the harmonic mean of precision and recall of an answer's words, from 0 to 1.

    The result is the highest value over the accepted answers. Two empty texts have the value 1.
    """
    ours = normalize(prediction).split()
    return max((_overlap(ours, normalize(each).split()) for each in accepted), default=0.0)


def _overlap(ours: Sequence[str], theirs: Sequence[str]) -> float:
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, without surrounding whitespace and one final period.

    A sentence ends with a period, an exclamation mark or a question mark before whitespace, or with
    a line break.
    """
    found = (each.strip().removesuffix(".") for each in _SENTENCE_END.split(text))
    return [each for each in found if each]


def sentence_recall(prediction: str, accepted: Iterable[str]) -> float:
    """Return the share of an accepted answer's sentences that the answer has, from 0 to 1.

    The result is the highest value over the accepted answers. The answer may have the sentences in
    any order, and other sentences as well.
    """
    ours = Counter(sentences(prediction))
    expected = [Counter(sentences(each)) for each in accepted]
    return max(
        ((ours & each).total() / each.total() if each else 1.0 for each in expected), default=0
    )


def sentence_f1(prediction: str, accepted: Iterable[str]) -> float:
    """Return the harmonic mean of precision and recall of an answer's sentences, from 0 to 1."""
    ours = sentences(prediction)
    return max((_overlap(ours, sentences(each)) for each in accepted), default=0.0)


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def lenient_match(prediction: str, accepted: Iterable[str]) -> bool:
    """Return whether an answer matches an accepted one by the paper's rule.

    Both texts are converted to lower case, and ASCII punctuation and `FUNCTION_WORDS` are removed.
    If nothing is left of a text, such as "The Who", it is only converted to lower case. The texts
    match if they are equal, or if every word of the shorter one occurs in the longer one. If the
    shorter one has three words or more, the lengths must also differ by at most `SLACK`.

    The authors' scripts remove different words, and use different values of the slack (5 for
    SQuAD). Some of them also treat number words as digits, or plurals as singulars. This function
    does neither.
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


def lenient_number(prediction: str, accepted: Iterable[str]) -> bool:
    r"""Return whether an answer matches an accepted one by the paper's rule for numbers.

    The final numbers are written with two decimals and without a sign. They match if the
    digits of one contain those of the other, so 3 matches 13.

    The authors' script reads the number in ``\boxed{``. From a response without it, the script
    joins all digits to one number. This function always reads the final number.
    """
    digits = _digits(prediction)
    others = [_digits(each) for each in accepted]
    return bool(digits) and any(each and (digits in each or each in digits) for each in others)


def _digits(text: str) -> str:
    value = final_number(text)
    return "" if value is None else f"{abs(value):.2f}"


@dataclass(frozen=True)
class MeanMetric:
    """A metric that is the mean of a value over all answers.

    Attributes:
        name: the metric's name in `METRICS`.
        value: function that returns the value of an answer, given the accepted answers.
        binary: whether every answer is either right or wrong.
    """

    name: str
    value: Callable[[str, Sequence[str]], float]
    binary: bool = True

    def statistics(self, prediction: str, accepted: Sequence[str]) -> Statistics:
        """Return the value of the answer, and 1, whose sum is the number of answers."""
        return float(self.value(prediction, accepted)), 1.0

    def score(self, sums: Sums) -> float:
        """Return the mean in percent."""
        return float(100.0 * sums[0] / sums[1])


@dataclass(frozen=True)
class CorpusMetric:
    """A metric of sacrebleu, computed from n-gram counts summed over the test set.

    Attributes:
        name: the metric's name in `METRICS`.
        scorer: the metric object of sacrebleu.
        binary: whether every answer is either right or wrong.
    """

    name: str
    scorer: Any
    binary: bool = False

    def statistics(self, prediction: str, accepted: Sequence[str]) -> Statistics:
        """Return the n-gram counts. Each accepted answer is a reference."""
        references = [[each] for each in accepted]
        (counts,) = self.scorer._extract_corpus_statistics([prediction], references)
        return tuple(map(float, counts))

    def score(self, sums: Sums) -> float:
        """Return the score that sacrebleu's ``corpus_score`` computes."""
        return float(self.scorer._compute_score_from_stats([int(each) for each in sums]).score)


SPBLEU_TOKENIZER = "flores101"
"""sacrebleu's name for the tokenizer of spBLEU, which the paper calls "spm". sacrebleu downloads
its file when it is first needed."""


def _chrf() -> Metric:
    from sacrebleu.metrics import CHRF

    return CorpusMetric("chrf", CHRF())


def _spbleu() -> Metric:
    from sacrebleu.metrics import BLEU

    return CorpusMetric("spbleu", BLEU(tokenize=SPBLEU_TOKENIZER, force=True))


METRICS: Mapping[str, Callable[[], Metric]] = {
    "exact_match": lambda: MeanMetric("exact_match", exact_match),
    "f1": lambda: MeanMetric("f1", f1, binary=False),
    "verbatim": lambda: MeanMetric("verbatim", verbatim),
    "contains": lambda: MeanMetric("contains", contains),
    "number": lambda: MeanMetric("number", number),
    "sentences": lambda: MeanMetric("sentences", sentence_recall, binary=False),
    "sentence_f1": lambda: MeanMetric("sentence_f1", sentence_f1, binary=False),
    "lenient_match": lambda: MeanMetric("lenient_match", lenient_match),
    "lenient_number": lambda: MeanMetric("lenient_number", lenient_number),
    "spbleu": _spbleu,
    "chrf": _chrf,
}


def load_metric(name: str) -> Metric:
    """Return the metric with the given name.

    Raises:
        InvalidInputError: the name is unknown.
        ImportError: the metric needs sacrebleu, which is not installed.
    """
    if name not in METRICS:
        raise InvalidInputError(
            f"there is no metric {name!r}.{nearest(name, METRICS)} Metrics: {', '.join(METRICS)}."
        )
    return METRICS[name]()
