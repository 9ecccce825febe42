"""Fit a calibration on labeled answers, and measure its quality on other answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from adafuse_llm.calibration import Calibration
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.evaluation.comparison import Score, share, unseen

__all__ = ["Coverage", "Reliability", "calibrate", "fit", "predicted", "reliability"]

Array = NDArray[np.float64]

FEWEST, FEWEST_OF_A_KIND = 50, 5
"""Minimum number of answers for a fit; minimum number of right ones, and of wrong ones."""

RIDGE = 1.0
"""Strength of the ridge: twice the factor of a standardized feature's squared coefficient."""

STEPS = 50
"""Maximum number of Newton steps. A fit ends early when the coefficients stop changing."""

FOLDS, GROUPS = 10, 5
"""Number of folds of the cross-validation, and of groups for the calibration error."""


class Coverage(BaseModel):
    """The accuracy of the surest answers.

    Attributes:
        answered: how many answers count as the surest, in percent of all.
        confidence: the lowest confidence of these answers.
        right: percentage of right answers among these.
    """

    model_config = ConfigDict(frozen=True)

    answered: int
    confidence: float
    right: Score


class Reliability(BaseModel):
    """The quality of confidences, measured on answers to which they were not fitted.

    Attributes:
        calibration: the calibration, fitted on all answers; None if only confidences are known.
        questions: number of answers.
        area: area under the ROC curve, in percent: how often a right answer has a higher confidence
            than a wrong one. The interval is DeLong's.
        error: mean distance between confidence and share of right answers, in percentage points,
            over `GROUPS` groups of answers with similar confidence, of about equal size.
        curve: accuracy of the surest tenth of the answers, of the surest two tenths, ..., of all.
    """

    model_config = ConfigDict(frozen=True)

    calibration: Calibration | None = None
    questions: int
    area: Score
    error: float
    curve: tuple[Coverage, ...]


def calibrate(
    strategy: str,
    members: Sequence[str],
    rows: Sequence[Sequence[float] | None],
    rights: Sequence[bool],
) -> Reliability:
    """Fit a calibration on all answers, and measure its quality by cross-validation.

    Args:
        strategy: name of the strategy that answered.
        members: names of the members that answered.
        rows: `adafuse_llm.calibration.features` of each answer. Answers with None do not count.
        rights: whether each answer is right.

    Raises:
        InvalidInputError: there are too few right or wrong answers.
    """
    known = [(row, right) for row, right in zip(rows, rights, strict=True) if row is not None]
    rows, rights = [row for row, _ in known], [right for _, right in known]
    hits = sum(rights)
    if len(rows) < FEWEST or min(hits, len(rows) - hits) < FEWEST_OF_A_KIND:
        raise InvalidInputError(
            f"a calibration needs {FEWEST} answered questions or more, {FEWEST_OF_A_KIND} of them "
            f"right and {FEWEST_OF_A_KIND} wrong; got {hits} right and {len(rows) - hits} wrong"
        )
    table, right = np.array(rows, dtype=np.float64), np.array(rights, dtype=bool)
    fold = np.empty(len(rows), dtype=np.int64)  # every fold has the same share of right answers
    order = np.lexsort((np.random.default_rng(1).random(len(rows)), right))
    fold[order] = np.arange(len(rows)) % FOLDS
    confidences = np.empty(len(rows))
    for number in range(FOLDS):
        coefficients = fit(table[fold != number], right[fold != number])
        confidences[fold == number] = predicted(table[fold == number], coefficients)
    intercept, logprob, *sums, agreement, length = (float(f"{c:.6g}") for c in fit(table, right))
    calibration = Calibration(
        strategy=strategy,
        members=dict(zip(members, sums, strict=True)),
        logprob=logprob,
        agreement=agreement,
        length=length,
        intercept=intercept,
    )
    worth = reliability(confidences.tolist(), rights)
    return worth.model_copy(update={"calibration": calibration})


def reliability(confidences: Sequence[float], rights: Sequence[bool]) -> Reliability:
    """Measure the quality of confidences. At least one answer must be right, and one wrong."""
    sure, right = np.array(confidences, dtype=np.float64), np.array(rights, dtype=bool)
    return Reliability(
        questions=len(sure),
        area=area(sure, right),
        error=calibration_error(sure, right),
        curve=curve(sure, right),
    )


def calibration_error(sure: Array, right: NDArray[np.bool_]) -> float:
    """Return the calibration error, in percentage points (``Reliability.error``)."""
    groups = np.array_split(np.argsort(-sure, kind="stable"), GROUPS)
    error = sum(len(group) * abs(sure[group].mean() - right[group].mean()) for group in groups)
    return 100 * float(error) / len(sure)


def curve(sure: Array, right: NDArray[np.bool_]) -> tuple[Coverage, ...]:
    """Return the accuracy of the surest tenth of the answers, the surest two tenths, ..., all."""
    order, found = np.argsort(-sure, kind="stable"), []
    for answered in range(10, 101, 10):
        chosen = order[: math.ceil(len(order) * answered / 100)]
        surest = share(int(right[chosen].sum()), len(chosen))
        found.append(Coverage(answered=answered, confidence=sure[chosen[-1]], right=surest))
    return tuple(found)


def fit(table: Array, right: NDArray[np.bool_]) -> Array:
    """Fit a logistic regression. Return its intercept and coefficients, [1 + features]."""
    of_right = np.column_stack((np.ones(len(table)), table))
    options = np.stack((np.zeros_like(of_right), of_right), axis=1)
    scale = table.std(axis=0)
    scale[scale < 1e-6] = 1.0  # the feature is the same in all answers
    penalty = np.array([0.0, *(RIDGE * scale**2)])
    return likeliest(options, right.astype(np.int64), penalty)[0]


def likeliest(table: Array, right: NDArray[np.int64], penalty: Array) -> tuple[Array, float]:
    """Return the coefficients, [features], with which the right options are likeliest.

    The table has the features of the options, [questions, options, features], and NaN where a
    question has fewer options than others. The probabilities are the `softmax` of
    ``table @ coefficients``. Newton's method maximizes the log-likelihood minus half of the penalty
    times the squared coefficients. The second result is this maximum.
    """
    questions, known = np.arange(len(table)), np.nan_to_num(table)
    coefficients, step = np.zeros(len(penalty)), np.ones(len(penalty))
    for _ in range(STEPS):
        chance = softmax(table @ coefficients)
        worth = np.log(chance[questions, right]).sum() - penalty @ coefficients**2 / 2
        if np.abs(step).max(initial=0.0) < 1e-9:
            break
        mean = np.einsum("qo,qof->qf", chance, known)
        slope = (known[questions, right] - mean).sum(axis=0) - penalty * coefficients
        curvature = np.einsum("qo,qof,qog->fg", chance, known, known) - mean.T @ mean
        step = np.linalg.solve(curvature + np.diag(penalty), slope)
        coefficients += step
    return coefficients, float(worth)


def softmax(scores: Array) -> Array:
    """Return probabilities, [..., options]. Where a score is NaN, the probability is 0."""
    odds = np.nan_to_num(np.exp(scores - np.nanmax(scores, axis=-1, keepdims=True)))
    fair: Array = odds / odds.sum(axis=-1, keepdims=True)
    return fair


def predicted(table: Array, coefficients: Array) -> Array:
    """Return the confidences, [answers], for a table of features, [answers, features]."""
    confidences: Array = 0.5 + 0.5 * np.tanh(0.5 * (coefficients[0] + table @ coefficients[1:]))
    return confidences


def area(sure: Array, right: NDArray[np.bool_]) -> Score:
    """Return the area under the ROC curve with its 95 % interval (DeLong et al., 1988)."""
    difference = sure[right][:, None] - sure[~right][None, :]
    wins = (difference > 0) + 0.5 * (difference == 0)
    value, sizes = float(wins.mean()), wins.shape
    reach = 1.0
    if min(sizes) > 1:
        parts = [wins.mean(axis=axis).var(ddof=1) / sizes[1 - axis] for axis in (0, 1)]
        reach = 1.96 * math.sqrt(sum(parts))
    edge = unseen(min(sizes))  # if all pairs are in order, the variance is 0
    low, high = min(value - reach, 1 - edge), max(value + reach, edge)
    return Score(value=100 * value, low=100 * max(0.0, low), high=100 * min(1.0, high))
