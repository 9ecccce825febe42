"""Search for the best members and options on some questions, and test them on others.

The labeled questions are divided at random. On the *search* part, every member answers alone, and
an optimizer (optuna's TPE) tries settings of the ensemble. The search selects the best setting and
the best single member. These two are compared on the *held-out* part, which the search never sees.
Only this comparison shows whether the ensemble is better than its best member.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.documents import question_messages
from adafuse_llm.embedded import heldout_questions
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import (
    InvalidInputError,
    InvalidOptionError,
    MissingDependencyError,
    install_command,
)
from adafuse_llm.evaluation.comparison import Comparison, compare
from adafuse_llm.evaluation.files import is_lost, put, read_lines
from adafuse_llm.evaluation.metrics import Metric, contains, load_metric
from adafuse_llm.evaluation.parallel import in_order
from adafuse_llm.report.page import count
from adafuse_llm.strategies.base import Strategy

if TYPE_CHECKING:
    import optuna

__all__ = ["Answer", "Question", "Trial", "Tuning", "embedded_questions", "read_questions", "tune"]

FEWEST: Final = 10
"""Minimum number of questions in each part."""

CHOICES: Final[Mapping[str, Sequence[float]]] = {
    "margin_threshold": (0.1, 0.3, 0.5, 0.7, 0.9),
    "max_words": (1, 2, 3, 4),
    "branching_factor": (1, 2, 3, 4, 5),
}
"""Values that the search tries for each option."""

WEIGHTS: Final = (0.25, 0.5, 1.0)
"""Values that the search tries for the weight of a member."""

SEARCHED: Final = (*CHOICES, "weights")
"""Options that the search varies if the strategy uses them, unless they are fixed. It always varies
which members decode."""


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers.

    Attributes:
        number: number of its line in the file, or of the embedded question, from 1.
        text: the question. Questions with the same text are never in different parts.
        request: the engine's arguments: the prompt or the messages.
        accepted: accepted answers, at least one.
    """

    number: int
    text: str
    request: Mapping[str, Any]
    accepted: tuple[str, ...]


def read_questions(content: bytes, form: str, *, chat: bool = False) -> list[Question]:
    """Return the questions of a JSON Lines file with ``question`` and ``answer``.

    Args:
        content: the file. An answer is a text or a list of accepted texts.
        form: the prompt of a question, with ``{question}``.
        chat: whether the prompt is sent as a message.

    Raises:
        InvalidInputError: a line cannot be used.
    """
    questions = []
    for line in read_lines(content):
        label = [line.label] if isinstance(line.label, str) else line.label
        problem = line.problem
        if problem is None and not (
            isinstance(label, list) and label and all(map(_is_text, label))
        ):
            problem = 'its "answer" must be a text or a list of texts, which are not empty'
        if problem is not None:
            raise InvalidInputError(f"line {line.number} of the test set: {problem}")
        text = line.question or ""
        request = put(form.replace("{question}", text), chat=chat)
        questions.append(Question(line.number, text, request, tuple(label)))
    return questions


def _is_text(label: object) -> bool:
    return isinstance(label, str) and bool(label.strip())


def embedded_questions(limit: int | None = 300) -> list[Question]:
    """Return the first held-out questions for the embedded members, or all if `limit` is None.

    Raises:
        InvalidInputError: `limit` is higher than the number of questions.
    """
    questions = []
    for number, each in enumerate(heldout_questions(limit), start=1):
        messages = question_messages(each.question, each.passages)
        text = messages[0]["content"]
        questions.append(Question(number, text, {"messages": messages}, (each.answer,)))
    return questions


class Answer(BaseModel):
    """An answer to a question.

    Attributes:
        line: number of the question.
        text: the answer that the metric reads from the response.
        is_right: whether it is right. An answer with an error is wrong.
        error: type and message of the error if the request failed.
        tokens: tokens that all members processed, those of the prompt that they had kept included,
            as if no earlier request had had the same beginning. None if the request failed.
    """

    model_config = ConfigDict(frozen=True)

    line: int
    text: str = ""
    is_right: bool = False
    error: str | None = None
    tokens: int | None = None


class Trial(BaseModel):
    """A setting and its result on one part of the questions.

    Attributes:
        options: options of `AdaFuseConfig`. Searched options that are absent have their defaults.
        score: score in percent.
        tokens: mean tokens per answer over all members.
        failed: number of answers with an error; they count as wrong.
        lost: number of answers that failed due to the run and not the question, such as lack of
            memory.
        missed: number of wrong answers that have an accepted answer in them.
        known: whether the answers come from an earlier decode of the same setting.
    """

    model_config = ConfigDict(frozen=True)

    options: dict[str, Any]
    score: float
    tokens: float
    failed: int = 0
    lost: int = 0
    missed: int = 0
    known: bool = False


class Tuning(BaseModel):
    """The result of a search. It can be written as JSON.

    Attributes:
        metric, seed: metric and seed of the search.
        searched, held_out: numbers of questions in the two parts.
        alone: results of single members on the search part, by name.
        trials: settings of the ensemble, in the order in which they were tried.
        best_member: name of the best single member on the search part. If several have the same
            score, it is the one with the fewest tokens.
        ensemble: the options that the search selected for the ensemble.
        tested: results of the ensemble and the best member on the held-out part. None if the run
            was interrupted before they were complete.
        comparison: paired comparison of these two results. None if ``tested`` is None.
    """

    model_config = ConfigDict(frozen=True)

    metric: str
    seed: int
    searched: int
    held_out: int
    alone: dict[str, Trial]
    trials: tuple[Trial, ...]
    best_member: str
    ensemble: dict[str, Any]
    tested: dict[str, Trial] | None = None
    comparison: Comparison | None = None

    @property
    def pays(self) -> bool:
        """Whether the ensemble beats the best member on held-out questions, at p < 0.05."""
        comparison = self.comparison
        return comparison is not None and comparison.verdict == "above" and not self.lost

    @property
    def lost(self) -> int:
        """Number of held-out answers that failed due to the run.

        If there are any, no conclusion is valid.
        """
        return sum(trial.lost for trial in (self.tested or {}).values())

    @property
    def options(self) -> dict[str, Any]:
        """The recommended options: those of the ensemble if it pays, else of the best member.

        If the run was interrupted before the comparison on the held-out part, the scores on the
        search part decide.
        """
        if self.comparison is None:
            ahead = cheapest(self.trials).score > self.alone[self.best_member].score
            return self.ensemble if ahead else self.single
        return self.ensemble if self.pays else self.single

    @property
    def single(self) -> dict[str, Any]:
        """The options with which the best member answers alone and greedily."""
        return {"use": [self.best_member]}

    @property
    def verdict(self) -> str:
        """The conclusion from the held-out questions, as a sentence."""
        comparison = self.comparison
        if comparison is None:
            return (
                "The run was interrupted before the held-out questions, so it does not show "
                f"whether the ensemble beats {self.best_member} alone."
            )
        if self.lost:
            return (
                f"{count(self.lost, 'answer')} to held-out questions failed, so the run does not "
                f"show whether the ensemble beats {self.best_member} alone. Run the same command "
                "again to answer them."
            )
        figures = (
            f"({comparison.ours:.1f} against {comparison.theirs:.1f} % {comparison.metric} on "
            f"{comparison.questions} held-out questions, difference "
            f"{comparison.difference.shown('+')}, {comparison.chance})"
        )
        if self.pays:
            return f"The ensemble beats its best member, {self.best_member} {figures}."
        if comparison.verdict == "below":
            return f"The ensemble does NOT beat its best member, {self.best_member} {figures}."
        needed = comparison.needed
        return (
            f"These {comparison.questions} questions show no difference between the ensemble and "
            f"its best member, {self.best_member} {figures}."
            + (f" About {needed} would be needed to show one this large." if needed else "")
        )


class _Stopped(Exception):  # noqa: N818
    """Raised if the search is cancelled."""


def tune(
    engine: AdaFuseEngine,
    questions: Sequence[Question],
    *,
    metric: str = "exact_match",
    trials: int = 30,
    seed: int = 1,
    held_out: float = 0.5,
    within: float = 0.0,
    fixed: Mapping[str, Any] | None = None,
    known: Iterable[Mapping[str, Any]] = (),
    log: Callable[[dict[str, Any]], None] | None = None,
    cancel: threading.Event | None = None,
    on_answer: Callable[[str, Answer], None] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> Tuning:
    """Search for the members and options that answer best, and test them on held-out questions.

    `RuntimeConfig.max_requests` of the engine sets how many questions are answered at a time.

    Args:
        engine: an engine with at least two members, and a strategy that uses an option of
            `SEARCHED`. The search ignores the engine's values of searched options. To keep a value,
            pass it as `fixed`.
        questions: labeled questions, at least `FEWEST` for each part.
        metric: name of the metric to maximize, in `METRICS`.
        trials: number of ensemble settings to try. A setting that decodes like an earlier one
            counts as a trial, but is not decoded again.
        seed: seed of the division into two parts and of the search.
        held_out: share of the questions to keep from the search, for the test.
        within: maximum distance from the best score, in percentage points. Of the settings within
            this distance, the one that processes the fewest tokens is selected. With 0, this is the
            best setting, or the cheapest of several that are equally good.
        fixed: options of `AdaFuseConfig` that are not searched. ``use`` names the members that may
            take part.
        known: data that `log` received in an earlier call. These answers are not decoded again,
            except those that failed due to the earlier run.
        log: called with the answers of every decoded setting, as JSON-safe data.
        cancel: an event that any thread can set to stop the search. The result is then based on the
            trials so far.
        on_answer: called for every new answer, with the names of the members and the answer.
        on_trial: called with every result on the search part, starting with single members.

    Raises:
        InvalidInputError: there are too few members, or too few questions in a part, or the
            strategy has no options to search, or the metric is unknown; nothing was computed.
        InvalidOptionError: an option is unknown or out of range.
        MissingDependencyError: optuna is not installed.
    """
    fixed = _by_name(engine, fixed or {})
    if (temperature := engine.config.override(fixed).temperature) > 0:
        raise InvalidOptionError(
            "option 'temperature': the search compares settings without sampling, so it must be 0; "
            f"got {temperature:g}"
        )
    members = candidates(engine.members, fixed.get("use") or engine.config.use, engine.strategy)
    measure = load_metric(metric)
    search, test = divide(questions, held_out, seed)
    if trials < 1:
        raise InvalidOptionError(f"trials must be 1 or more; got {trials}")
    if not 0 <= within <= 100:
        raise InvalidOptionError(f"option 'within' must be between 0 and 100 points; got {within}")
    study = optimizer(seed)
    space = _SearchSpace(members, fixed, engine)
    answers = _Answers(engine, measure, known=known, log=log, cancel=cancel, on_answer=on_answer)
    report = on_trial or (lambda _trial: None)
    alone: dict[str, Trial] = {}
    tried: list[Trial] = []
    try:
        for member in members:
            alone[member] = answers.trial(search, {"use": [member]})
            report(alone[member])
        ranked = sorted(alone, key=lambda name: (-alone[name].score, alone[name].tokens))
        for start in space.starts(ranked):
            study.enqueue_trial(start, skip_if_exists=True)
        for _ in range(trials):
            suggestion = study.ask()
            trial = answers.trial(search, space.setting(suggestion))
            report(trial)
            study.tell(suggestion, trial.score)
            tried.append(trial)
        ensemble, single = cheapest(tried, within).options, {"use": [ranked[0]]}
        tested = {
            "ensemble": answers.trial(test, ensemble),
            f"{ranked[0]} alone": answers.trial(test, single),
        }
        rights = [
            [answer.is_right for answer in answers.of(test, each)] for each in (ensemble, single)
        ]
        ends: dict[str, Any] = {"tested": tested, "comparison": compare(metric, *rights)}
    except _Stopped:
        if not tried:
            raise InvalidInputError(
                "interrupted before any setting of the ensemble was tried; nothing was found"
            ) from None
        ends = {}
    return Tuning(
        metric=metric,
        seed=seed,
        searched=len(search),
        held_out=len(test),
        alone=alone,
        trials=tuple(tried),
        best_member=ranked[0],
        ensemble=cheapest(tried, within).options,
        **ends,
    )


def divide(
    questions: Sequence[Question], held_out: float, seed: int
) -> tuple[list[Question], list[Question]]:
    """Divide questions at random into a search part and a held-out part.

    Both parts keep the order of the questions. Equal questions are never in different parts.

    Raises:
        InvalidOptionError: ``held_out`` is not between 0 and 1.
        InvalidInputError: a part has fewer than `FEWEST` questions.
    """
    if not 0 < held_out < 1:
        raise InvalidOptionError(f"held_out must be between 0 and 1; got {held_out}")
    different = list(dict.fromkeys(question.text.strip() for question in questions))
    size = round(len(different) * held_out)
    drawn = set(random.Random(seed).sample(different, size))  # noqa: S311
    search = [question for question in questions if question.text.strip() not in drawn]
    test = [question for question in questions if question.text.strip() in drawn]
    if min(len(search), len(test)) < FEWEST:
        raise InvalidInputError(
            f"too few questions: {len(questions)} give {len(search)} for the search and "
            f"{len(test)} held-out ones, and each part needs {FEWEST}. Change held_out or use "
            "more questions (several hundred are necessary to detect a difference of a few points)."
        )
    return search, test


def cheapest(trials: Iterable[Trial], within: float = 0.0) -> Trial:
    """Return the trial with the fewest tokens among those at most `within` points below the best.

    If several have the same number of tokens, return the one with the highest score. If their
    scores are equal too, return the earliest one.
    """
    trials = list(trials)
    lowest = max(trial.score for trial in trials) - within - 1e-9
    return min(
        (trial for trial in trials if trial.score >= lowest),
        key=lambda trial: (trial.tokens, -trial.score),
    )


def canonical(options: Mapping[str, Any], *, equal_by_default: bool = True) -> dict[str, Any]:
    """Return the form of a setting that is equal for all settings that decode alike.

    Weights are divided by the largest one. Options that have no effect together with the other
    options are left out.

    Args:
        options: the setting.
        equal_by_default: whether the members have equal weights if a setting has no weights. Equal
            weights are then left out.
    """
    kept = dict(options)
    weights = kept.pop("weights", None)
    if weights:
        largest = max(weights.values())
        relative = {name: weight / largest for name, weight in weights.items()}
        if not equal_by_default or set(relative.values()) != {1.0}:
            kept["weights"] = relative
    if kept.get("margin_threshold") == 0:  # every margin reaches the threshold
        kept.pop("branching_factor", None)
    if kept.get("max_words") == kept.get("branching_factor") == 1:  # each span is one word
        kept.pop("margin_threshold", None)
    return kept


def _by_name(engine: AdaFuseEngine, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fixed options, with weights as a mapping from member names.

    Raises:
        InvalidOptionError: an option is out of range, a member that may take part has no weight, or
            all of them have weight 0.
    """
    weights = engine.config.override(fixed).weights
    if weights is None or "weights" not in fixed:
        return dict(fixed)
    if isinstance(weights, tuple) and len(weights) == len(engine.members):
        weights = dict(zip(engine.members, weights, strict=True))
    taking_part = fixed.get("use") or engine.config.use or engine.members
    if isinstance(weights, tuple) or any(name not in weights for name in taking_part):
        raise InvalidOptionError(
            f"fixed weights must include {', '.join(taking_part)}. Pass a mapping from names to "
            "numbers, or one number per member of the ensemble, in order; got "
            f"{fixed['weights']!r}"
        )
    if not any(weights[name] for name in taking_part):
        raise InvalidOptionError(
            f"all members that may take part ({', '.join(taking_part)}) have weight 0"
        )
    return {**fixed, "weights": weights}


def candidates(
    members: Sequence[str], allowed: Sequence[str] | None, strategy: Strategy
) -> tuple[str, ...]:
    """Return the members that may take part, in the order of `members`.

    Raises:
        InvalidInputError: fewer than two members may take part, or the strategy has no options to
            search.
    """
    if not strategy.options & set(SEARCHED):
        raise InvalidInputError(
            f"strategy {strategy.name!r} has no options to tune. Choose one that uses "
            f"{', '.join(SEARCHED[:-1])} or {SEARCHED[-1]}, such as 'adafuse' or 'mixture'."
        )
    names = tuple(name for name in members if name in (allowed or members))
    if len(names) < 2:
        raise InvalidInputError(
            f"tuning an ensemble needs at least two members; got {', '.join(names) or 'none'}"
        )
    return names


def optimizer(seed: int) -> optuna.Study:
    """Return the optuna study that suggests settings.

    Raises:
        MissingDependencyError: optuna is not installed.
    """
    try:
        import optuna
    except ImportError as missing:
        raise MissingDependencyError(f"tuning needs optuna: {install_command('tune')}") from missing
    with _warnings_only(optuna):
        sampler = optuna.samplers.TPESampler(seed=seed)
        return optuna.create_study(direction="maximize", sampler=sampler)


@contextmanager
def _warnings_only(optuna: Any) -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


OWN_WEIGHTS: Final = "weights of the strategy"
"""Name of the optimizer's parameter that decides whether the strategy sets the weights."""


class _SearchSpace:
    """The settings from which the search selects.

    Args:
        members: names of the members that may take part.
        fixed: options that are not searched.
        engine: the engine, for the options and the weights of its strategy.
    """

    def __init__(
        self, members: Sequence[str], fixed: Mapping[str, Any], engine: AdaFuseEngine
    ) -> None:
        strategy = engine.strategy
        weights = fixed.get("weights")
        self._equal_by_default = len(set(strategy.weights(engine.backends))) == 1
        self._searches_weights = weights is None and "weights" in strategy.options
        self._choices = {
            name: values
            for name, values in CHOICES.items()
            if name in strategy.options and name not in fixed
        }
        self._sets = {
            "+".join(chosen): chosen
            for size in range(len(members), 1, -1)
            for chosen in itertools.combinations(members, size)
            if weights is None or any(weights[name] for name in chosen)
        }
        self._fixed = {name: value for name, value in fixed.items() if name != "use"}

    def starts(self, ranked: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the first settings to try.

        They have the default options, first unchanged and then with a branching factor of 1. Each
        is tried with all members and with the best two (the paper's Top-2).
        """
        defaults = AdaFuseConfig()
        best = set(ranked[:2])
        for branches in (defaults.branches, 1):
            for name, chosen in self._sets.items():
                if len(chosen) == len(ranked) or set(chosen) == best:
                    yield {
                        "use": name,
                        "margin_threshold": defaults.margin_threshold,
                        "max_words": defaults.max_words,
                        "branching_factor": branches,
                        OWN_WEIGHTS: True,
                        **{f"weight of {member}": 1.0 for member in chosen},
                    }

    def setting(self, suggestion: optuna.Trial) -> dict[str, Any]:
        """Return the options that the optimizer suggests."""
        chosen = self._sets[suggestion.suggest_categorical("use", list(self._sets))]
        options: dict[str, Any] = {"use": list(chosen)}
        for name, values in self._choices.items():
            options[name] = suggestion.suggest_categorical(name, values)
        options |= self._fixed
        if "weights" in self._fixed:
            options["weights"] = {member: self._fixed["weights"][member] for member in chosen}
        elif self._searches_weights and not self._has_own_weights(suggestion):
            options["weights"] = {
                member: suggestion.suggest_categorical(f"weight of {member}", WEIGHTS)
                for member in chosen
            }
        return canonical(options, equal_by_default=self._equal_by_default)

    def _has_own_weights(self, suggestion: optuna.Trial) -> bool:
        """Return whether the strategy sets the weights. Equal ones are a case of the searched."""
        return not self._equal_by_default and suggestion.suggest_categorical(
            OWN_WEIGHTS, (True, False)
        )


class _Answers:
    """The answers of every setting. Each setting is decoded only once.

    Args:
        engine: the ensemble.
        metric: the metric that reads and judges answers.
        known, log, cancel, on_answer: as for `tune`.
    """

    def __init__(
        self,
        engine: AdaFuseEngine,
        metric: Metric,
        *,
        known: Iterable[Mapping[str, Any]],
        log: Callable[[dict[str, Any]], None] | None,
        cancel: threading.Event | None,
        on_answer: Callable[[str, Answer], None] | None,
    ) -> None:
        self._engine, self._single = engine, engine.with_strategy("single")
        self._metric, self._log, self._on_answer = metric, log, on_answer
        self._cancel = cancel or threading.Event()
        self._known: dict[str, list[Answer]] = {}
        self._lines: dict[str, int] = {}
        self._fresh: set[str] = set()
        for line in known:
            self._lines[line["key"]] = line["line"]
            self._known[line["key"]] = [Answer(**fields) for fields in line["answers"]]

    def trial(self, questions: Sequence[Question], options: dict[str, Any]) -> Trial:
        """Return the result of a setting.

        Raises:
            _Stopped: the search was cancelled before all questions were answered.
        """
        before = len(self._fresh)
        answers = self.of(questions, options)
        counts = [answer.tokens for answer in answers if answer.tokens is not None]
        accepted = {question.number: question.accepted for question in questions}
        return Trial(
            options=options,
            score=100 * fmean(answer.is_right for answer in answers),
            tokens=fmean(counts) if counts else 0.0,
            failed=sum(answer.error is not None for answer in answers),
            lost=sum(is_lost(answer.error) for answer in answers),
            missed=sum(
                not each.is_right and contains(each.text, accepted[each.line]) for each in answers
            ),
            known=before == len(self._fresh),
        )

    def of(self, questions: Sequence[Question], options: dict[str, Any]) -> list[Answer]:
        """Return the answers of a setting. Those that failed due to an earlier run are decoded."""
        key = json.dumps([[question.number for question in questions], options], sort_keys=True)
        done = {each.line: each for each in self._known.get(key, ())}
        if key in self._fresh:
            return list(done.values())
        kept = {line: each for line, each in done.items() if not is_lost(each.error)}
        missing = [question for question in questions if question.number not in kept]
        if missing:
            new = {answer.line: answer for answer in self._decode(missing, options)}
            done = {question.number: (kept | new)[question.number] for question in questions}
            self._known[key] = list(done.values())
            self._fresh.add(key)
            line = self._lines.setdefault(key, len(self._lines) + 1)
            data = [each.model_dump(mode="json", exclude_none=True) for each in done.values()]
            if self._log is not None:
                self._log({"line": line, "key": key, "answers": data})
        return self._known[key]

    def _decode(
        self, questions: Sequence[Question], options: Mapping[str, Any]
    ) -> Iterator[Answer]:
        is_single = len(options["use"]) == 1
        engine = self._single if is_single else self._engine
        options = options if is_single else {**_DEFAULTS, **options}
        engine.config.override(options)  # a wrong option is an error here, not in every answer

        def ask(question: Question) -> Answer | None:
            try:
                done = engine.generate(**question.request, **options, cancel=self._cancel)
            except Exception as error:  # an error in one question must not stop the others
                problem = " ".join(f"{type(error).__name__}: {error}".split())
                return Answer(line=question.number, error=problem)
            if done.finish_reason == "cancelled":
                return None
            text, usage = self._metric.read(done.answer), done.usage
            return Answer(
                line=question.number,
                text=text,
                is_right=self._metric.is_right(text, question.accepted),
                tokens=sum(usage.tokens_processed.values()) + sum(usage.cached_tokens.values()),
            )

        try:
            for answer in in_order(ask, questions, engine.runtime.max_requests):
                if answer is None:
                    raise _Stopped
                if self._on_answer is not None:
                    self._on_answer("+".join(options["use"]), answer)
                yield answer
        except BaseException:  # cancel the running requests, because their results are not needed
            self._cancel.set()
            raise


_DEFAULTS = AdaFuseConfig().model_dump(include={*SEARCHED})
"""Defaults of the searched options. They replace the engine's values in every ensemble setting."""
