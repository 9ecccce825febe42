"""Fit a calibration of typed questions, and measure its quality by cross-validation.

`read_labeled` reads the questions, `measured` asks the members, and `fit_decisions` fits a
`DecisionCalibration` to their answers. The order of the options needs no coefficient, because the
members' probabilities are means over all orders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from threading import Event

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from adafuse_llm.adapters.questions import as_text, to_question
from adafuse_llm.calibration import DecisionCalibration
from adafuse_llm.decisions import Question, state_text
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import DecodingError, InvalidInputError, short_list, short_repr
from adafuse_llm.evaluation import confidence
from adafuse_llm.evaluation.comparison import Score, share
from adafuse_llm.evaluation.confidence import FOLDS, Array, Coverage
from adafuse_llm.evaluation.files import Line, read_lines
from adafuse_llm.evaluation.parallel import in_order
from adafuse_llm.results import Answer

WORTH = 1.92  # what a member must add to the log-likelihood: p < 0.05 in a likelihood-ratio test
LEAST = 2e-3  # smallest coefficient of a chosen member, or sum of all if no member helps


class DecisionFit(BaseModel):
    """A calibration fitted on all questions, and its quality by cross-validation.

    Attributes:
        calibration: the calibration. In 95 % of cases, at most the allowed share of the answers at
            or above its threshold is wrong. If the questions do not show this, it has no threshold.
        questions: number of questions.
        alone: by member, share of right answers of this member alone, fitted in the same way.
        accuracy: share of right answers of all members together.
        error: calibration error in percentage points, as in `Reliability`.
        area: area under the ROC curve of the first label; None unless there are two labels.
        curve: accuracy of the surest tenth of the answers, of the surest two tenths, ..., of all.
        coverage: percentage of the answers at or above the threshold; 0 without a threshold.
        beta: share of questions that every member alone gets wrong, so that no choice among their
            answers is right.
        flips: by member, share of questions whose likeliest option changes with the options' order.
    """

    model_config = ConfigDict(frozen=True)

    calibration: DecisionCalibration
    questions: int
    alone: dict[str, Score]
    accuracy: Score
    error: float
    area: Score | None
    curve: tuple[Coverage, ...]
    coverage: int
    beta: Score
    flips: dict[str, Score]


@dataclass(frozen=True)
class Labeled:
    """A typed question about a state, its right option, and its line in the file."""

    state: str
    question: Question
    right: str
    line: int = 0

    @property
    def options(self) -> list[str]:
        """The options, in the order of the columns of log-probabilities."""
        return self.question.orders(1)[0]


def read_labeled(content: bytes, limit: int | None = None) -> list[Labeled]:
    """Return the typed questions of a JSON Lines file, or the first `limit` of them.

    Raises:
        InvalidInputError: a line cannot be used, or there are too few questions for a fit.
    """
    questions = []
    for line in read_lines(content)[:limit]:
        try:
            questions.append(_labeled(line))
        except InvalidInputError as error:
            raise InvalidInputError(f"line {line.number} of the test set: {error}") from None
    _columns(questions)
    return questions


def _labeled(line: Line) -> Labeled:
    options = line.item.get("options")
    kind = line.item.get("type", "predicate" if options is None else "choice")
    question = to_question({"type": kind, "instructions": line.question, "criteria": options})
    state = state_text(line.item.get("state"), 'its "state"')
    labeled = Labeled(state, question, as_text(line.label), line.number)
    if labeled.right not in labeled.options:
        raise InvalidInputError(
            f'its "answer" must be one of {short_list(labeled.options)}; got '
            f"{short_repr(line.label)}"
        )
    return labeled


def _columns(questions: Sequence[Labeled]) -> tuple[NDArray[np.int64], list[str], list[int]]:
    """Return the indices of the right options, the labels, and the numbers of the states.

    The labels are the options that get intercepts: all if the questions share them, else none.

    Raises:
        InvalidInputError: there are too few questions, states or answers per label for a fit.
    """
    rights = [each.options.index(each.right) for each in questions]
    is_same = all(each.options == questions[0].options for each in questions)
    labels = questions[0].options if is_same else []
    numbers: dict[str, int] = {}
    states = [numbers.setdefault(each.state, len(numbers)) for each in questions]
    counts = np.bincount(rights, minlength=len(labels))
    is_rare = bool(labels) and counts.min() < confidence.FEWEST_OF_A_KIND
    if len(rights) < confidence.FEWEST or len(numbers) < FOLDS or is_rare:
        raise InvalidInputError(
            f"a fit needs {confidence.FEWEST} labeled questions about {FOLDS} states, and "
            f"{confidence.FEWEST_OF_A_KIND} for each label with an intercept; got {len(rights)} of "
            f"{len(numbers)} states; by option: {', '.join(map(str, counts))}"
        )
    return np.array(rights), labels, states


def measured(
    engine: AdaFuseEngine, questions: Iterable[Labeled], cancel: Event
) -> Generator[Answer]:
    """Ask the members, and yield their answers in order.

    Raises:
        DecodingError: a member cannot answer a question.
    """
    names = engine.config.member_weights(engine.members)

    def read(asked: Labeled) -> Answer:
        question = {f"line {asked.line}": asked.question}
        decision = engine.decide(asked.state, question, cancel=cancel)
        (answer,) = decision.values()
        if len(answer.members) < len(names):
            raise DecodingError(f"line {asked.line}: {answer.warnings[0]}. Leave it out with --use")
        return answer

    return in_order(read, questions, engine.runtime.max_requests, cancel)


def fit_decisions(
    questions: Sequence[Labeled], answers: Sequence[Answer], most_wrong: float = 5.0
) -> DecisionFit:
    """Fit a calibration. If all questions have the same options, each option gets an intercept.

    Args:
        questions: the questions. Questions about the same state are in the same fold.
        answers: the answer to each question, in which all members took part.
        most_wrong: percentage of the answers at or above the threshold that may be wrong.

    Raises:
        InvalidInputError: there are too few questions for a fit.
    """
    right, labels, states = _columns(questions)
    members = [*answers[0].members]
    table = _table(members, answers, len(labels))
    fold = np.random.default_rng(1).permutation(max(states) + 1)[states] % FOLDS

    def tested(allowed: Sequence[int]) -> Array:
        found = np.zeros(table.shape[:2])
        for number in range(FOLDS):
            known = fold != number
            coefficients = _best(table[known], right[known], allowed, len(members))
            found[~known] = confidence.softmax(table[~known] @ coefficients)
        return found

    everyone = range(len(members))
    hits = np.array([tested([each]).argmax(axis=1) == right for each in everyone])
    probabilities = tested(everyone)
    sure, is_right = probabilities.max(axis=1), probabilities.argmax(axis=1) == right
    points = confidence.curve(sure, is_right)
    enough = [each for each in points if _bound(each, len(right)) <= most_wrong]
    weights, intercepts = np.split(_best(table, right, everyone, len(members)), [len(members)])
    calibration = DecisionCalibration(
        weights=dict(zip(members, (weights / weights.sum()).tolist(), strict=True)),
        temperature=float(1 / weights.sum()),
        intercepts=dict(zip(labels, intercepts.tolist(), strict=True)),
        threshold=enough[-1].confidence if enough else None,
    )
    return DecisionFit(
        calibration=calibration,
        questions=len(right),
        alone={name: _share(each) for name, each in zip(members, hits, strict=True)},
        accuracy=_share(is_right),
        error=confidence.calibration_error(sure, is_right),
        area=confidence.area(probabilities[:, 0], right == 0) if len(labels) == 2 else None,
        curve=points,
        coverage=enough[-1].answered if enough else 0,
        beta=_share(np.all(~hits, axis=0)),
        flips={name: _share([name in each.swayed for each in answers]) for name in members},
    )


def _share(hits: Sequence[bool] | NDArray[np.bool_]) -> Score:
    return share(int(np.sum(hits)), len(hits))


def _bound(point: Coverage, questions: int) -> float:
    """Return an upper bound for the percentage of wrong answers among the surest ones.

    In 95 % of cases, the bounds of all ten points of a curve hold: each fails in 0.5 % at most.
    """
    size = math.ceil(questions * point.answered / 100)
    return 100 - share(round(size * point.right.value / 100), size, tail=0.005).low


def _table(members: Sequence[str], answers: Sequence[Answer], labels: int) -> Array:
    """Return the features of the options, [questions, options, members + labels].

    They are each member's log-probabilities minus their mean, and 1 for the option's own label.
    Where a question has fewer options than others, the features are NaN.
    """
    most = max(len(each.probabilities) for each in answers)
    table = np.full((len(answers), most, len(members) + labels), np.nan)
    for row, answer in zip(table, answers, strict=True):
        likely = np.array([[*answer.members[name].values()] for name in members])
        known = np.log(np.maximum(likely, 1e-300))  # [members, options]; some may have rounded to 0
        row[: known.shape[1], : len(known)] = (known - known.mean(axis=1, keepdims=True)).T
        row[:, len(known) :] = np.eye(most, labels)
    return table


def _best(table: Array, right: NDArray[np.int64], allowed: Sequence[int], members: int) -> Array:
    """Return the best coefficients: at least 0 for allowed members, and 0 for other members.

    Noise gives even a member that knows nothing a small coefficient. So a further member
    gets one only if it adds `WORTH` to the log-likelihood.
    """
    labels, found = range(members, table.shape[2]), []
    for size in range(1, len(allowed) + 1):
        for chosen in itertools.combinations(allowed, size):
            coefficients, worth = _fit(table, right, [*chosen, *labels])
            if coefficients[[*chosen]].min() >= LEAST:
                found.append((worth - WORTH * size, coefficients))
    if found:
        return max(found, key=lambda each: each[0])[1]
    coefficients, _ = _fit(table, right, labels)
    coefficients[[*allowed]] = LEAST / len(allowed)
    return coefficients


def _fit(table: Array, right: NDArray[np.int64], columns: Sequence[int]) -> tuple[Array, float]:
    """Return the `likeliest` coefficients (0 outside `columns`), and the maximum they reach."""
    known = table[..., columns]
    scale = np.maximum(np.nanstd(known, axis=(0, 1)), 1e-6)
    coefficients = np.zeros(table.shape[2])
    coefficients[columns], worth = confidence.likeliest(known, right, confidence.RIDGE * scale**2)
    return coefficients, worth
