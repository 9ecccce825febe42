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
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import (
    InvalidInputError,
    InvalidOptionError,
    MissingDependencyError,
    install_command,
)
from adafuse_llm.evaluation.metrics import Metric, load_metric
from adafuse_llm.evaluation.runner import (
    Evaluation,
    Record,
    System,
    answer_all,
    compared,
    lost,
    merged,
    singly,
    tokens,
    unanswered,
)
from adafuse_llm.evaluation.statistics import Comparison
from adafuse_llm.evaluation.tasks import Question, Task
from adafuse_llm.report.page import count
from adafuse_llm.strategies.base import Strategy

if TYPE_CHECKING:
    import optuna

__all__ = ["Trial", "Tuning", "tune"]

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


class Trial(BaseModel):
    """A setting and its result on the search part.

    Attributes:
        options: options of `AdaFuseConfig`. Searched options that are absent have their defaults.
        score: score in percent.
        tokens: tokens per answer over all members, counted by `runner.tokens`.
        failed: number of answers with an error; they count as wrong.
        known: whether the answers come from an earlier decode of the same setting.
    """

    model_config = ConfigDict(frozen=True)

    options: dict[str, Any]
    score: float
    tokens: float
    failed: int = 0
    known: bool = False


class Tuning(BaseModel):
    """The result of a search. It can be written as JSON.

    Attributes:
        task, metric, seed: task, metric and seed of the search.
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

    task: str
    metric: str
    seed: int
    searched: int
    held_out: int
    alone: dict[str, Trial]
    trials: tuple[Trial, ...]
    best_member: str
    ensemble: dict[str, Any]
    tested: dict[str, Evaluation] | None = None
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
        return sum(evaluation.lost for evaluation in (self.tested or {}).values())

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
    task: Task,
    questions: Sequence[Question],
    *,
    metric: Metric | None = None,
    trials: int = 30,
    seed: int = 1,
    held_out: float = 0.5,
    within: float = 0.0,
    fixed: Mapping[str, Any] | None = None,
    header: str = "",
    form: str | None = None,
    chat: bool = False,
    known: Iterable[Mapping[str, Any]] = (),
    log: Callable[[dict[str, Any]], None] | None = None,
    cancel: threading.Event | None = None,
    on_record: Callable[[str, Record], None] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> Tuning:
    """Search for the members and options that answer best, and test them on held-out questions.

    Args:
        engine: an engine with at least two members, and a strategy that uses an option of
            `SEARCHED`. The search ignores the engine's values of searched options. To keep a value,
            pass it as `fixed`.
        task: the task, which defines prompts and reads answers from responses.
        questions: labeled questions, at least `FEWEST` for each part.
        metric: the metric to maximize; None for the task's main metric.
        trials: number of ensemble settings to try. A setting that decodes like an earlier one
            counts as a trial, but is not decoded again.
        seed: seed of the division into two parts and of the search.
        held_out: share of the questions to keep from the search, for the test.
        within: maximum distance from the best score, in percentage points. Of the settings within
            this distance, the one that processes the fewest tokens is selected. With 0, this is the
            best setting, or the cheapest of several that are equally good.
        fixed: options of `AdaFuseConfig` that are not searched. ``use`` names the members that may
            take part.
        header: text before every question.
        form: template of a question; None for the task's template.
        chat: whether the prompt is sent as a message.
        known: data that `log` received in an earlier call. These answers are not decoded again,
            except those that failed due to the earlier run.
        log: called with the answers of every decoded setting, as JSON-safe data.
        cancel: an event that any thread can set to stop the search. The result is then based on the
            trials so far.
        on_record: called for every new record, with the names of the members and the record.
        on_trial: called with every result on the search part, starting with single members.

    Raises:
        InvalidInputError: there are too few members, or too few questions in a part, or the
            strategy has no options to search; nothing was computed.
        InvalidOptionError: an option is unknown or out of range.
        MissingDependencyError: optuna is not installed.
    """
    fixed = _by_name(engine, fixed or {})
    if (temperature := engine.config.override(fixed).temperature) > 0:
        raise InvalidOptionError(
            "option 'temperature': the search compares settings without sampling, so it must be 0; "
            f"got {temperature:g}"
        )
    allowed = fixed.get("use") or engine.config.use
    members = candidates(engine.members, allowed, engine.strategy)
    metric = metric or load_metric(task.metrics[0])
    search, test = divide(questions, held_out, seed)
    if trials < 1:
        raise InvalidOptionError(f"trials must be 1 or more; got {trials}")
    if not 0 <= within <= 100:
        raise InvalidOptionError(f"option 'within' must be between 0 and 100 points; got {within}")
    study = optimizer(seed)
    space = _SearchSpace(members, fixed, engine)
    with singly(engine) as single:
        prompt = {"header": header, "form": form, "chat": chat}
        answers = _AnswerCache(engine, single, task, metric, prompt)
        answers.restore(known)
        answers.log, answers.on_record = log or answers.log, on_record or answers.on_record
        answers.cancel = cancel or answers.cancel
        done = _Progress(on_trial or (lambda _trial: None))
        try:
            for member in members:
                done.alone[member] = done.report(answers.trial(search, {"use": [member]}))
            for start in space.starts(done.ranked):
                study.enqueue_trial(start, skip_if_exists=True)
            for _ in range(trials):
                suggestion = study.ask()
                trial = done.report(answers.trial(search, space.setting(suggestion)))
                study.tell(suggestion, trial.score)
                done.tried.append(trial)
            best, ensemble = done.ranked[0], cheapest(done.tried, within).options
            ours = answers.records(test, ensemble)
            theirs = answers.records(test, {"use": [best]})
        except _Stopped:
            if not done.tried:
                raise InvalidInputError(
                    "interrupted before any setting of the ensemble was tried; nothing was found"
                ) from None
            ours = theirs = []
    tuning = Tuning(
        task=task.name,
        metric=metric.name,
        seed=seed,
        searched=len(search),
        held_out=len(test),
        alone=done.alone,
        trials=tuple(done.tried),
        best_member=done.ranked[0],
        ensemble=cheapest(done.tried, within).options,
    )
    if not theirs:
        return tuning
    tested = {
        name: Evaluation.of(records, [metric], task=task.name, system=name)
        for name, records in (("ensemble", ours), (f"{tuning.best_member} alone", theirs))
    }
    (comparison,) = compared(ours, theirs, [metric])
    return tuning.model_copy(update={"tested": tested, "comparison": comparison})


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
    different = list(dict.fromkeys(_texts(question) for question in questions))
    size = round(len(different) * held_out)
    drawn = set(random.Random(seed).sample(different, size))  # noqa: S311
    search = [question for question in questions if _texts(question) not in drawn]
    test = [question for question in questions if _texts(question) in drawn]
    if min(len(search), len(test)) < FEWEST:
        raise InvalidInputError(
            f"too few questions: {len(questions)} give {len(search)} for the search and "
            f"{len(test)} held-out ones, and each part needs {FEWEST}. Change held_out or use "
            "more questions (several hundred are necessary to detect a difference of a few points)."
        )
    return search, test


def _texts(question: Question) -> tuple[str, ...]:
    return question.text.strip(), *(passage.text for passage in question.passages)


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


class _Progress:
    """The results of a search so far.

    Args:
        on_trial: called with every result.

    Attributes:
        alone: results of single members, by name.
        tried: results of settings of the ensemble.
    """

    def __init__(self, on_trial: Callable[[Trial], None]) -> None:
        self.alone: dict[str, Trial] = {}
        self.tried: list[Trial] = []
        self._on_trial = on_trial

    def report(self, trial: Trial) -> Trial:
        """Pass a result to `on_trial`, and return it."""
        self._on_trial(trial)
        return trial

    @property
    def ranked(self) -> list[str]:
        """Names of the members, best first. With equal scores, fewer tokens come first."""
        return sorted(self.alone, key=lambda n: (-self.alone[n].score, self.alone[n].tokens))


class _AnswerCache:
    """The answers of every setting. Each setting is decoded only once.

    Attributes:
        log, on_record, cancel: as for `tune`.
    """

    def __init__(
        self,
        engine: AdaFuseEngine,
        single: AdaFuseEngine,
        task: Task,
        metric: Metric,
        prompt: Mapping[str, Any],
    ) -> None:
        self._engine, self._single = engine, single
        self._task, self._metric, self._prompt = task, metric, prompt
        self._known: dict[str, list[Record]] = {}
        self._partial: dict[str, list[Record]] = {}
        self._lines: dict[str, int] = {}
        self.log: Callable[[dict[str, Any]], None] = lambda _line: None
        self.on_record: Callable[[str, Record], None] = lambda _name, _record: None
        self.cancel = threading.Event()

    def restore(self, logged: Iterable[Mapping[str, Any]]) -> None:
        """Restore the answers that an earlier call passed to `log`."""
        for line in logged:
            key, records = line["key"], [Record(**fields) for fields in line["records"]]
            self._lines[key] = line["line"]
            (self._partial if lost(records) else self._known)[key] = records

    def trial(self, questions: Sequence[Question], options: dict[str, Any]) -> Trial:
        """Return the result of a setting on the search part."""
        known = _key(questions, options) in self._known
        records = self.records(questions, options)
        statistics = [record.statistics(self._metric) for record in records]
        counts = [tokens(record.usage) for record in records if record.usage is not None]
        return Trial(
            options=options,
            score=self._metric.score([sum(column) for column in zip(*statistics, strict=True)]),
            tokens=fmean(counts) if counts else 0.0,
            failed=sum(record.error is not None for record in records),
            known=known,
        )

    def records(self, questions: Sequence[Question], options: dict[str, Any]) -> list[Record]:
        """Return the answers of a setting.

        Raises:
            _Stopped: the search was cancelled before all questions were answered.
        """
        key = _key(questions, options)
        if key not in self._known:
            done = self._partial.pop(key, [])
            new = self._decode(unanswered(questions, done), options)
            self._known[key] = merged(done, new)
            data = [
                record.model_dump(mode="json", exclude_none=True) for record in self._known[key]
            ]
            line = self._lines.setdefault(key, len(self._lines) + 1)
            self.log({"line": line, "key": key, "records": data})
        return self._known[key]

    def _decode(self, questions: Sequence[Question], options: dict[str, Any]) -> list[Record]:
        name = "+".join(options["use"])
        alone = len(options["use"]) == 1
        answers = answer_all(
            self._single if alone else self._engine,
            self._task,
            questions,
            [self._metric],
            system=System(name, options if alone else {**_DEFAULTS, **options}),
            cancel=self.cancel,
            **self._prompt,
        )
        records = []
        for record in answers:
            self.on_record(name, record)
            records.append(record)
        if len(records) < len(questions):
            raise _Stopped
        return records


_DEFAULTS = AdaFuseConfig().model_dump(include={*SEARCHED})
"""Defaults of the searched options. They replace the engine's values in every ensemble setting."""


def _key(questions: Sequence[Question], options: Mapping[str, Any]) -> str:
    return json.dumps([[question.number for question in questions], options], sort_keys=True)
