"""Fit decisions on labeled questions, and measure by cross-validation what they are worth.

`read_labeled` reads the questions, `measured` asks the members, and `fit_labeled` fits the answers.

The scores of the options are the weighted mean of the members' log-probabilities, divided by a
temperature, plus an intercept for each label; their softmax are the probabilities. The order of the
options needs no intercept, because the log-probabilities are means over the orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, repeat
from threading import Event
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from adafuse_llm import decisions as typed
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import DecodingError, InvalidInputError, short_list, short_repr
from adafuse_llm.evaluation.comparison import Score, share
from adafuse_llm.evaluation.confidence import Array, Coverage, area, calibration_error, curve
from adafuse_llm.evaluation.files import Line, read_lines

FEWEST, FEWEST_OF_A_LABEL, FOLDS = 50, 5, 10
RIDGE = 1.0  # of squared coefficients, for log-probabilities with a standard deviation of 1
WORTH = 1.92  # what a member must add to the log-likelihood: p < 0.05 in a likelihood-ratio test
LEAST = 2e-3  # smallest coefficient of a chosen member, or sum of all if no member helps
STEPS = 50

Record: TypeAlias = dict[str, Any]


class DecisionFit(BaseModel):
    """A fit on all questions, and what it is worth on questions that it was not fitted on.

    Attributes:
        weights: weight of each member, 0 for those that do not help. They sum to 1.
        temperature: what the weighted mean of the log-probabilities is divided by.
        intercepts: what is then added, by label. Empty if there are no labels.
        questions: number of questions.
        alone: share of right answers of each member alone, fitted in the same way.
        accuracy: share of right answers of all members together.
        error: calibration error in points, as in `Reliability`.
        area: of two labels, the area under the ROC curve of the first one.
        curve: accuracy against coverage, from the surest tenth to all answers.
        threshold: confidence from which on few enough answers are wrong, in 95 % of cases; or None.
        coverage: share of the answers at or above the threshold, in percent.
        beta: share of questions that all members alone get wrong, whatever chooses among them.
        flips: share of questions whose likeliest option changes with the order, by member.
    """

    model_config = ConfigDict(frozen=True)

    weights: dict[str, float]
    temperature: float
    intercepts: dict[str, float]
    questions: int
    alone: dict[str, Score]
    accuracy: Score
    error: float
    area: Score | None
    curve: tuple[Coverage, ...]
    threshold: float | None
    coverage: float
    beta: Score
    flips: dict[str, Score] = {}


@dataclass(frozen=True)
class Labeled:
    """A typed question about a state, on a line of a file. The answer is ``options[right]``."""

    line: int
    state: str
    question: typed.Question
    options: list[str]
    right: int


def read_labeled(content: bytes, limit: int | None = None) -> list[Labeled]:
    """Return the typed questions of a JSON Lines file, or the first `limit` of them.

    Raises:
        InvalidInputError: a line cannot be used, or there are too few for a fit.
    """
    questions = []
    for line in read_lines(content)[:limit]:
        try:
            questions.append(_labeled(line))
        except InvalidInputError as error:
            raise InvalidInputError(f"line {line.number} of the test set: {error}") from None
    _check_enough(**_facts(questions))
    return questions


def _labeled(line: Line) -> Labeled:
    text, options = line.question, line.item.get("options")
    kind = line.item.get("kind", "predicate" if options is None else "choice")
    if kind == "predicate" and options is None:
        question: typed.Question = typed.Predicate(text)
    elif kind in ("choice", "score"):
        question = (typed.Choice if kind == "choice" else typed.Score)(text, options or [])
    else:
        raise InvalidInputError(
            'its "kind" must be choice or score with "options", or predicate without; got '
            f"{short_repr(kind)} with {short_repr(options)}"
        )
    names = question.orders(1)[0]
    if line.label not in names:
        raise InvalidInputError(
            f'its "answer" must be one of {short_list(names)}; got {short_repr(line.label)}'
        )
    state = typed.state_text(line.item.get("state"), 'its "state"')
    return Labeled(line.number, state, question, names, names.index(line.label))


def _facts(questions: Sequence[Labeled]) -> dict[str, Any]:
    """Return what a fit takes besides the log-probabilities."""
    first, numbers = questions[0].options, dict[str, int]()
    return {
        "rights": [each.right for each in questions],
        "labels": first if all(each.options == first for each in questions) else (),
        "groups": [numbers.setdefault(each.state, len(numbers)) for each in questions],
    }


def measured(
    engine: AdaFuseEngine, questions: Sequence[Labeled], known: Sequence[Record], cancel: Event
) -> Iterator[Record]:
    """Yield the log-probabilities of each prompt, [options] by member, as JSON data.

    A question has a prompt for each order. Those that are `known` are left out.
    """
    done, prompts = {record["line"] for record in known}, []
    for asked in questions:
        named = {f"line {asked.line}": asked.question}
        requests, _ = typed.ask(engine, [asked.state], named, {"cancel": cancel})
        prompts += [*zip(requests, repeat(asked), asked.question.orders(None))]
    todo = [number for number in range(len(prompts)) if number not in done]
    for index, scores in engine.open([prompts[number][0] for number in todo]):
        _, asked, order = prompts[todo[index]]
        rows = {}
        for member in engine.config.member_weights(engine.members):
            found = typed.label_logprobs(member, order, scores)
            rows[member] = [found[option] for option in asked.options]
            if -math.inf in rows[member]:
                raise DecodingError(
                    f"line {asked.line}: member {member!r} gives an option no probability. Leave "
                    "it out with --use."
                )
        yield {"line": todo[index], "logprobs": rows}


def fit_labeled(
    questions: Sequence[Labeled], records: Sequence[Record], most_wrong: float
) -> DecisionFit:
    """Fit what `measured` has found, as `fit_decisions` does."""
    found = (record["logprobs"] for record in sorted(records, key=lambda each: each["line"]))
    tables = [  # [orders, members, options]
        np.array([[*next(found).values()] for _ in each.question.orders(None)])
        for each in questions
    ]
    members = [*records[0]["logprobs"]]
    means = [table.mean(axis=0) for table in tables]
    fit = fit_decisions(members, means, most_wrong=most_wrong, **_facts(questions))
    changes = {name: flips([table[:, n] for table in tables]) for n, name in enumerate(members)}
    return fit.model_copy(update={"flips": changes})


def fit_decisions(
    members: Sequence[str],
    logprobs: Sequence[Array],
    rights: Sequence[int],
    *,
    labels: Sequence[str] = (),
    groups: Sequence[int] | None = None,
    most_wrong: float = 5.0,
) -> DecisionFit:
    """Fit decisions on labeled questions.

    Args:
        members: names of the members.
        logprobs: the log-probabilities of each question, [members, options].
        rights: index of the right option of each question.
        labels: names of the options, if all questions have the same ones, which get intercepts.
        groups: number of the state of each question; folds do not share states. Default: none do.
        most_wrong: percentage of the answers at or above the threshold that may be wrong.

    Raises:
        InvalidInputError: there are too few questions.
    """
    groups = range(len(rights)) if groups is None else groups
    _check_enough(rights, labels, groups)
    right, states = np.array(rights), np.unique(groups, return_inverse=True)[1]
    everyone = range(len(members))
    table = _table(logprobs, len(labels))
    fold = np.random.default_rng(1).permutation(states.max() + 1)[states] % FOLDS

    def tested(allowed: Sequence[int]) -> Array:
        found = np.zeros(table.shape[:2])
        for number in range(FOLDS):
            known = fold != number
            coefficients = _best(table[known], right[known], allowed, len(members))
            found[~known] = _softmax(table[~known] @ coefficients)
        return found

    hits = np.array([tested([each]).argmax(axis=1) == right for each in everyone])
    probabilities = tested(everyone)
    sure, is_right = probabilities.max(axis=1), probabilities.argmax(axis=1) == right
    best = _best(table, right, everyone, len(members))
    total = best[: len(members)].sum()
    covered = _covered(sure, is_right, most_wrong)
    return DecisionFit(
        weights=dict(zip(members, (best[: len(members)] / total).tolist(), strict=True)),
        temperature=float(1 / total),
        intercepts=dict(zip(labels, best[len(members) :].tolist(), strict=True)),
        questions=len(right),
        alone={
            name: share(int(own.sum()), own.size) for name, own in zip(members, hits, strict=True)
        },
        accuracy=share(int(is_right.sum()), len(right)),
        error=calibration_error(sure, is_right),
        area=area(probabilities[:, 0], right == 0) if len(labels) == 2 else None,
        curve=curve(sure, is_right),
        threshold=float(np.sort(sure)[-covered]) if covered else None,
        coverage=100 * covered / len(right),
        beta=share(int((~hits.any(axis=0)).sum()), len(right)),
    )


def _check_enough(rights: Sequence[int], labels: Sequence[str], groups: Sequence[int]) -> None:
    size, counts = len({*groups}), np.bincount(np.array(rights), minlength=len(labels))
    if len(rights) < FEWEST or size < FOLDS or (labels and counts.min() < FEWEST_OF_A_LABEL):
        raise InvalidInputError(
            f"a fit needs {FEWEST} labeled questions about {FOLDS} states, and {FEWEST_OF_A_LABEL} "
            f"for each label with an intercept; got {len(rights)} of {size} states; by option: "
            f"{', '.join(map(str, counts))}"
        )


def flips(orders: Sequence[Array]) -> Score:
    """Return the share of questions whose likeliest option changes with the order.

    The log-probabilities of each question are [orders, options].
    """
    return share(sum(len({*each.argmax(axis=1).tolist()}) > 1 for each in orders), len(orders))


def _table(logprobs: Sequence[Array], labels: int) -> Array:
    """Return the factors of the coefficients, [questions, options, members + labels].

    Where a question has fewer options than others, they are NaN.
    """
    most = max(each.shape[1] for each in logprobs)
    table = np.full((len(logprobs), most, len(logprobs[0]) + labels), np.nan)
    for row, each in zip(table, logprobs, strict=True):
        row[: each.shape[1], : len(each)] = (each - each.mean(axis=1, keepdims=True)).T
        row[:, len(each) :] = np.eye(most, labels)
    return table


def _softmax(scores: Array) -> Array:
    odds = np.nan_to_num(np.exp(scores - np.nanmax(scores, axis=1, keepdims=True)), nan=0.0)
    fair: Array = odds / odds.sum(axis=1, keepdims=True)
    return fair


def _best(table: Array, right: NDArray[np.int64], allowed: Sequence[int], members: int) -> Array:
    """Return the best coefficients: at least 0 for allowed members, and 0 for other members."""
    labels, found = range(members, table.shape[2]), []
    for size in range(1, len(allowed) + 1):
        for chosen in combinations(allowed, size):
            coefficients, worth = _fit(table, right, [*chosen, *labels])
            if coefficients[[*chosen]].min() >= LEAST:
                found.append((worth - WORTH * size, coefficients))
    if found:
        return max(found, key=lambda each: each[0])[1]
    coefficients, _ = _fit(table, right, labels)
    coefficients[[*allowed]] = LEAST / len(allowed)
    return coefficients


def _fit(table: Array, right: NDArray[np.int64], columns: Sequence[int]) -> tuple[Array, float]:
    """Maximize the penalized log-likelihood by Newton's method. Return the coefficients and it."""
    exists, questions = ~np.isnan(table[..., 0]), np.arange(len(right))
    known = np.where(exists[..., None], table[..., columns], 0.0)
    scale = np.maximum(known[exists].std(axis=0), 1e-6)
    known /= scale
    weights, step = np.zeros(len(columns)), np.ones(len(columns))
    for _ in range(STEPS):
        chance = _softmax(np.where(exists, known @ weights, np.nan))
        worth = np.log(chance[questions, right]).sum() - RIDGE * (weights @ weights) / 2
        if np.abs(step).max(initial=0.0) < 1e-9:
            break
        mean = np.einsum("qo,qof->qf", chance, known)
        slope = (known[questions, right] - mean).sum(axis=0) - RIDGE * weights
        curvature = np.einsum("qo,qof,qog->fg", chance, known, known) - mean.T @ mean
        step = np.linalg.solve(curvature + RIDGE * np.eye(len(columns)), slope)
        weights += step
    coefficients = np.zeros(table.shape[2])
    coefficients[columns] = weights / scale
    return coefficients, float(worth)


def _covered(sure: Array, is_right: NDArray[np.bool_], most_wrong: float) -> int:
    """Return how many of the surest answers to give. Each of ten bounds fails in 0.5 % of cases."""
    wrong = np.cumsum(~is_right[np.argsort(-sure, kind="stable")])
    sizes = [math.ceil(len(sure) * tenths / 10) for tenths in range(10, 0, -1)]
    bounds = ((size, share(int(wrong[size - 1]), size, tail=0.005).high) for size in sizes)
    return next((size for size, bound in bounds if bound <= most_wrong), 0)
