"""Metrics of the paper's tables. Scores are percentages.

exact_match, contains, verbatim, number   right or wrong (`adafuse_llm.evaluation.exact_match`)
f1              overlap of words after SQuAD's normalization
sentences       share of the accepted answer's sentences that the answer has
sentence_f1     overlap of the sentences of both answers
spbleu, chrf    sacrebleu's metrics over the whole test set
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adafuse_llm.errors import InvalidInputError, nearest
from adafuse_llm.evaluation.exact_match import (
    contains,
    exact_match,
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
