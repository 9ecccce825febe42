"""Search for the best members and options on some questions, and test them on others.

The search divides the labeled questions at random. On the *search* half, every member answers
alone, and the ensemble answers with several settings, most of them random. The best setting and the
best single member then compete on the *held-out* half, which the search never sees. Only this
comparison shows whether the ensemble is better than its best member.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import InitVar, dataclass
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from adafuse_llm.calibration import features
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import (
    CacheMemoryError,
    ContextWindowError,
    DecodingError,
    InvalidInputError,
    InvalidOptionError,
    RequestCancelledError,
)
from adafuse_llm.evaluation.comparison import Comparison, Score, compare, share
from adafuse_llm.evaluation.confidence import Reliability, calibrate
from adafuse_llm.evaluation.exact_match import Metric, load_metric
from adafuse_llm.evaluation.files import read_lines
from adafuse_llm.evaluation.parallel import in_order
from adafuse_llm.report.styles import count
from adafuse_llm.strategies.base import Strategy

__all__ = ["Answer", "Question", "Trial", "Tuning", "read_questions", "tune"]

logger = logging.getLogger(__name__)

SEED = 1
"""Seed of the division into two halves, and of the random settings."""

FEWEST = 10
"""Minimum number of questions in each half."""

LASTING = (CacheMemoryError, ContextWindowError, DecodingError)
"""Errors that the same question causes again in every run, so that its answer counts as wrong."""

CHOICES: Mapping[str, Sequence[float]] = {
    "margin_threshold": (0.1, 0.3, 0.5, 0.7, 0.9),
    "max_words": (1, 2, 3, 4),
    "branching_factor": (1, 2, 3, 4, 5),
}
"""Values that the search tries, by option. The search leaves out options that the strategy does not
use or that the caller has fixed. It also varies which members decode."""


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers.

    Attributes:
        number: number of the line in the file, from 1.
        text: the question. Questions with the same text are always in the same half.
        request: arguments of `AdaFuseEngine.generate`: the prompt or the messages.
        accepted: accepted answers, at least one.
    """

    number: int
    text: str
    request: Mapping[str, Any]
    accepted: tuple[str, ...]


def read_questions(content: bytes, form: str, *, chat: bool = False) -> list[Question]:
    """Return the questions of a JSON Lines file. Repeated ones are left out with a warning.

    `form` is a prompt with ``{question}`` in it. With `chat`, prompts are sent as messages.

    Raises:
        InvalidInputError: a line cannot be used.
    """
    questions: dict[str, Question] = {}
    lines = read_lines(content)
    for line in lines:
        label = [line.label] if isinstance(line.label, str) else line.label
        texts = label if isinstance(label, list) else []
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise InvalidInputError(
                f'line {line.number} of the test set: its "answer" must be a text or a list of '
                "texts, which are not empty"
            )
        text = line.question
        prompt = form.replace("{question}", text)
        messages = [{"role": "user", "content": prompt}]
        request: dict[str, Any] = {"messages": messages} if chat else {"prompt": prompt}
        question = Question(line.number, text, request, tuple(texts))
        questions.setdefault(text.strip(), question)
    if repeated := len(lines) - len(questions):
        logger.warning("%s with the question of an earlier line left out", count(repeated, "line"))
    return list(questions.values())


class Answer(BaseModel):
    """An answer to a question.

    Attributes:
        line: number of the question (`Question.number`).
        text: the answer that the metric reads from the response.
        is_right: whether the answer is right. A failed request counts as a wrong answer.
        error: type and message of the error if the request failed.
        tokens: number of tokens, summed over the members, that were processed or reused from
            earlier requests with the same beginning. None if the request failed.
        features: numbers for a calibration (`adafuse_llm.calibration.features`); None if unknown.
    """

    model_config = ConfigDict(frozen=True)

    line: int
    text: str = ""
    is_right: bool = False
    error: str | None = None
    tokens: int | None = None
    features: tuple[float, ...] | None = None


class Trial(BaseModel):
    """A setting and its result on one half of the questions.

    Attributes:
        options: options of `AdaFuseConfig`. Searched options that are absent have their defaults.
        score: percentage of right answers.
        tokens: mean number of tokens per answer, summed over the members.
        failed: number of answers with an error, which count as wrong.
    """

    model_config = ConfigDict(frozen=True)

    options: dict[str, Any]
    score: float
    tokens: float
    failed: int = 0


class Tuning(BaseModel):
    """The result of a search and its test.

    Attributes:
        metric: name of the metric of the search.
        strategy: name of the strategy of the ensemble.
        searched, held_out: numbers of questions in the two halves.
        alone: results of the members alone on the search half, by name.
        trials: results of the ensemble's settings on the search half, in the order of the search.
        best_member: name of the best single member on the search half. Of members with equal
            scores, the one with the fewest tokens wins.
        ensemble: the options of the best setting on the search half.
        tested: by name, results of the ensemble and the best member on the held-out half.
        comparison: paired comparison of these two results.
        out_of_reach: share of the questions of the search half that every member alone answers
            wrong. No choice among the members' answers is right on these questions.
        confidence: by name as in `tested`, the calibration from all questions with its quality, or
            the reason why there is none.
    """

    model_config = ConfigDict(frozen=True)

    metric: str
    strategy: str
    searched: int
    held_out: int
    alone: dict[str, Trial]
    trials: tuple[Trial, ...]
    best_member: str
    ensemble: dict[str, Any]
    tested: dict[str, Trial]
    comparison: Comparison
    out_of_reach: Score
    confidence: dict[str, Reliability | str]

    @property
    def pays(self) -> bool:
        """Whether the ensemble beats the best member on the held-out questions, at p < 0.05."""
        return self.comparison.verdict == "above"

    @property
    def options(self) -> dict[str, Any]:
        """The recommended options: `ensemble` if it `pays`, or else the best member alone."""
        return self.ensemble if self.pays else {"use": [self.best_member]}

    def confidence_of(self, options: Mapping[str, Any]) -> Reliability | str:
        """Return the entry of `confidence` for the options of a setting in `tested`."""
        name = "ensemble" if options == self.ensemble else f"{self.best_member} alone"
        return self.confidence[name]

    @property
    def verdict(self) -> str:
        """The conclusion from the held-out questions, as a sentence."""
        test = self.comparison
        figures = (
            f"({test.ours:.1f} against {test.theirs:.1f} % {test.metric} on {test.questions} "
            f"held-out questions, difference {test.difference.shown('+')}, {test.chance})"
        )
        if test.verdict != "not shown":
            beats = "beats" if self.pays else "does NOT beat"
            return f"The ensemble {beats} its best member, {self.best_member} {figures}."
        needed = f" About {test.needed} would be needed to show one this large."
        return (
            f"These {test.questions} questions show no difference between the ensemble and "
            f"its best member, {self.best_member} {figures}.{needed if test.needed else ''}"
        )


def tune(
    engine: AdaFuseEngine,
    questions: Sequence[Question],
    *,
    metric: str = "exact_match",
    trials: int = 30,
    fixed: Mapping[str, Any] | None = None,
    known: Iterable[Mapping[str, Any]] = (),
    log: Callable[[dict[str, Any]], None] | None = None,
    cancel: threading.Event | None = None,
    on_answer: Callable[[str, Answer], None] | None = None,
) -> Tuning:
    """Search for the members and options that answer best, and test them on held-out questions.

    The engine answers `RuntimeConfig.max_requests` questions at a time. An error in `LASTING` is a
    wrong answer; every other error ends the search.

    Args:
        engine: an engine with at least two members, and a strategy that uses an option of
            `CHOICES`. The search ignores the engine's values of these options.
        questions: questions with accepted answers, at least `FEWEST` for each half.
        metric: name of the metric to maximize, in `METRICS`.
        trials: maximum number of ensemble settings to try, all different.
        fixed: options that are not searched. ``use`` names the members that may take part.
        known: what `log` received in an earlier call. These answers are not decoded again.
        log: function to call with every new answer as JSON data.
        cancel: event that any thread can set to stop the search.
        on_answer: function to call with the members' names, joined by ``+``, and every new answer.

    Raises:
        InvalidInputError: there are too few members or questions, the strategy has no options to
            search, or the metric is unknown. Nothing has been decoded.
        InvalidOptionError: an option is unknown, out of range, or turns on sampling.
        RequestCancelledError: `cancel` was set before the end.
    """
    fixed = dict(fixed or {})
    config = engine.config.override(fixed)
    if config.temperature > 0:
        raise InvalidOptionError(
            "option 'temperature': the search compares settings without sampling, so it must be 0; "
            f"got {config.temperature:g}"
        )
    if trials < 1:
        raise InvalidOptionError(f"trials must be 1 or more; got {trials}")
    members = candidates(engine.members, config, engine.strategy)
    fixed.pop("use", None)
    sizes = range(len(members), 1, -1)
    sets = [list(names) for size in sizes for names in itertools.combinations(members, size)]
    for chosen in sets:
        config.override({"use": chosen}).member_weights(engine.members)
    measure = load_metric(metric)
    search, test = divide(questions)
    cancel = cancel or threading.Event()
    answers = _Answers(engine, measure, known, log, cancel, on_answer)
    # let every member answer alone
    alone = {member: answers.trial(search, {"use": [member]}) for member in members}
    ranked = sorted(alone, key=lambda name: (-alone[name].score, alone[name].tokens))
    # try settings of the ensemble: first the defaults, with all members and with the best two
    best_two = [name for name in members if name in ranked[:2]]  # the paper's Top-2
    ensembles = [sets[0]] if len(members) == 2 else [sets[0], best_two]
    varied = CHOICES.keys() & engine.strategy.options - fixed.keys()
    choices = {name: values for name, values in CHOICES.items() if name in varied}
    planned: list[dict[str, Any]] = [
        {"use": names, **_DEFAULTS, "branching_factor": branches}
        for branches, names in itertools.product((AdaFuseConfig().branches, 1), ensembles)
    ]
    rng = random.Random(SEED)  # noqa: S311
    tried: dict[str, Trial] = {}
    different = len(sets) * math.prod(map(len, choices.values()))
    while len(tried) < min(trials, different):
        if not planned:  # then random settings
            drawn = {name: rng.choice(values) for name, values in choices.items()}
            planned.append({"use": rng.choice(sets), **drawn})
        setting = planned.pop(0)
        options = {name: setting[name] for name in ("use", *choices)}
        tried[repr(options)] = answers.trial(search, {**options, **fixed})
    # test the best setting and the best member on questions that the search has not seen
    best = min(tried.values(), key=lambda trial: (-trial.score, trial.tokens))
    settings = {"ensemble": best.options, f"{ranked[0]} alone": {"use": [ranked[0]]}}
    tested = {name: answers.trial(test, setting) for name, setting in settings.items()}
    rights = [[a.is_right for a in answers.of(test, setting)] for setting in settings.values()]
    # count the questions that no member alone answers right
    singles = [answers.of(search, {"use": [member]}) for member in members]
    missed = sum(not any(answer.is_right for answer in row) for row in zip(*singles, strict=True))
    return Tuning(
        metric=metric,
        strategy=engine.strategy.name,
        searched=len(search),
        held_out=len(test),
        alone=alone,
        trials=tuple(tried.values()),
        best_member=ranked[0],
        ensemble=settings["ensemble"],
        tested=tested,
        comparison=compare(metric, *rights),
        out_of_reach=share(missed, len(search)),
        confidence={
            name: answers.calibrated(search + test, setting) for name, setting in settings.items()
        },
    )


def divide(questions: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Divide questions at random into a search half and a held-out half, and keep their order.

    Raises:
        InvalidInputError: a half has fewer than `FEWEST` questions.
    """
    different = list(dict.fromkeys(question.text.strip() for question in questions))
    size = len(different) // 2
    if size < FEWEST:
        raise InvalidInputError(
            f"tuning needs {2 * FEWEST} different questions or more; got {len(different)}. To "
            "detect a difference of a few points, several hundred are necessary."
        )
    drawn = set(random.Random(SEED).sample(different, size))  # noqa: S311
    search = [question for question in questions if question.text.strip() not in drawn]
    return search, [question for question in questions if question.text.strip() in drawn]


def candidates(
    members: Sequence[str], config: AdaFuseConfig, strategy: Strategy
) -> tuple[str, ...]:
    """Return the members that may take part, in the order of `members`.

    Raises:
        InvalidInputError: they are fewer than two, or the strategy has no options to search.
        InvalidOptionError: ``use`` or ``weights`` do not match the members.
    """
    if not strategy.options & CHOICES.keys():
        raise InvalidInputError(
            f"strategy {strategy.name!r} has no options to tune. Choose one that uses "
            f"{' or '.join(CHOICES)}, such as 'adafuse' or 'mixture'."
        )
    names = tuple(config.member_weights(members))
    if len(names) < 2:
        raise InvalidInputError(
            f"tuning an ensemble needs at least two members; got {', '.join(names)}"
        )
    return names


@dataclass
class _Answers:
    """The answers of all settings, none decoded twice. The fields are arguments of `tune`."""

    engine: AdaFuseEngine
    metric: Metric
    known: InitVar[Iterable[Mapping[str, Any]]]
    log: Callable[[dict[str, Any]], None] | None
    cancel: threading.Event
    on_answer: Callable[[str, Answer], None] | None

    def __post_init__(self, known: Iterable[Mapping[str, Any]]) -> None:
        self._single = self.engine.with_strategy("single")
        self._done = {line["key"]: Answer(**line["answer"]) for line in known}

    def trial(self, questions: Sequence[Question], options: dict[str, Any]) -> Trial:
        answers = self.of(questions, options)
        counts = [answer.tokens for answer in answers if answer.tokens is not None]
        return Trial(
            options=options,
            score=100 * fmean(answer.is_right for answer in answers),
            tokens=fmean(counts) if counts else 0.0,
            failed=sum(answer.error is not None for answer in answers),
        )

    def of(self, questions: Sequence[Question], options: dict[str, Any]) -> list[Answer]:
        numbers = [question.number for question in questions]
        keys = {number: json.dumps([number, options], sort_keys=True) for number in numbers}
        missing = [question for question in questions if keys[question.number] not in self._done]
        for answer in self._decode(missing, options) if missing else ():
            key = keys[answer.line]
            self._done[key] = answer
            if self.log is not None:
                data = answer.model_dump(mode="json", exclude_none=True)
                self.log({"key": key, "answer": data})
        return [self._done[key] for key in keys.values()]

    def calibrated(self, asked: Sequence[Question], options: dict[str, Any]) -> Reliability | str:
        answers = self.of(asked, options)
        names = options["use"]
        strategy = (self._single if len(names) == 1 else self.engine).strategy.name
        try:
            rows = [answer.features for answer in answers]
            return calibrate(strategy, names, rows, [answer.is_right for answer in answers])
        except InvalidInputError as error:
            return str(error)

    def _decode(
        self, questions: Sequence[Question], options: Mapping[str, Any]
    ) -> Iterator[Answer]:
        is_single = len(options["use"]) == 1
        engine = self._single if is_single else self.engine
        chosen = options if is_single else {**_DEFAULTS, **options}

        def ask(question: Question) -> Answer | None:
            try:
                done = engine.generate(**question.request, **chosen, cancel=self.cancel)
            except LASTING as error:
                return Answer(line=question.number, error=f"{type(error).__name__}: {error}")
            if done.finish_reason == "cancelled":
                return None
            text, usage = self.metric.read(done.answer), done.usage
            return Answer(
                line=question.number,
                text=text,
                is_right=self.metric.is_right(text, question.accepted),
                tokens=sum(usage.tokens_processed.values()) + sum(usage.cached_tokens.values()),
                features=features(done, options["use"]),
            )

        answers = in_order(ask, questions, engine.runtime.max_requests, self.cancel)
        with closing(answers):  # on an error, cancel the running requests
            for answer in answers:
                if answer is None:
                    raise RequestCancelledError("the search was cancelled before its end")
                if self.on_answer is not None:
                    self.on_answer("+".join(options["use"]), answer)
                yield answer


_DEFAULTS = AdaFuseConfig().model_dump(include={*CHOICES})
"""Defaults of the searched options. In every ensemble setting, they replace the engine's values."""
