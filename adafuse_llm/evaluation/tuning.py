"""Which members, and with which options? A search on some questions, tested on others.

The labelled questions are divided at random. On the *search* part every member answers alone, and
an optimiser (optuna's TPE) tries settings of the ensemble; the best is kept. On the *held-out*
part, which the search never sees, that setting is compared with the best single member, which was
chosen on the search part, too. Only this comparison says whether fusing pays.
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
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, MissingDependencyError
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

if TYPE_CHECKING:
    import optuna

__all__ = ["Trial", "Tuning", "tune"]

FEWEST: Final = 10
"""Questions that each part needs at least."""

THRESHOLDS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
WORDS: Final = (1, 2, 3, 4)
BRANCHES: Final = (1, 2, 3, 4, 5)
WEIGHTS: Final = (0.25, 0.5, 1.0)
"""What is tried of each option."""

SEARCHED: Final = ("margin_threshold", "max_words", "branching_factor", "weights")
"""Options that are searched, besides which members decode, unless they are fixed."""


class Trial(BaseModel):
    """A setting and how it did on the search part.

    Attributes:
        options: of `AdaFuseConfig`; what is left out has its default.
        score: in percent.
        tokens: per answer, all members together, as `runner.tokens` counts them.
        failed: answers that have an error; they count as wrong.
        known: whether the setting had been decoded before; it then cost nothing.
    """

    model_config = ConfigDict(frozen=True)

    options: dict[str, Any]
    score: float
    tokens: float
    failed: int = 0
    known: bool = False


class Tuning(BaseModel):
    """What a search has found. JSON-safe.

    Attributes:
        task, metric, seed: of the search.
        searched, held_out: numbers of questions in the two parts.
        alone: members by themselves, on the search part.
        trials: settings of the ensemble, in the order in which they were tried.
        best_member: of those on the search part; the cheaper one of equals.
        ensemble: the options that were chosen for the ensemble.
        tested: ensemble and best member on the held-out part; None if that was not reached.
        comparison: of the two there, question by question; None if that was not reached.
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
        """Whether the ensemble is above the best member on held-out questions, at p < 0.05."""
        found = self.comparison
        return found is not None and found.verdict == "above" and not self.lost

    @property
    def lost(self) -> int:
        """Answers to held-out questions that failed of the run; with one, nothing is shown."""
        return sum(each.lost for each in (self.tested or {}).values())

    @property
    def options(self) -> dict[str, Any]:
        """What to decode with: the ensemble if it pays, else the best member alone. Before the
        held-out questions were reached, whichever was better in the search.
        """
        if self.comparison is None:
            ahead = cheapest(self.trials).score > self.alone[self.best_member].score
            return self.ensemble if ahead else self.single
        return self.ensemble if self.pays else self.single

    @property
    def single(self) -> dict[str, Any]:
        """The best member alone, greedily."""
        return {"use": [self.best_member], "branching_factor": 1}

    @property
    def verdict(self) -> str:
        """What the held-out questions show, in a sentence."""
        found = self.comparison
        if found is None:
            return (
                "Interrupted before the held-out questions: nothing is shown about the ensemble "
                f"against {self.best_member} alone."
            )
        if self.lost:
            return (
                f"{count(self.lost, 'answer')} to held-out questions failed, so nothing is shown "
                f"about the ensemble against {self.best_member} alone. The same command asks again."
            )
        figures = (
            f"({found.ours:.1f} against {found.theirs:.1f} % {found.metric} on {found.questions} "
            f"held-out questions, difference {found.difference.shown('+')}, {found.chance})"
        )
        if self.pays:
            return f"The ensemble beats its best member, {self.best_member} {figures}."
        if found.difference.value > 0:
            return (
                f"The ensemble is not shown to beat its best member, {self.best_member} {figures}. "
                "More questions may tell."
            )
        return f"The ensemble does NOT beat its best member, {self.best_member} {figures}."


class _Stopped(Exception):  # noqa: N818
    """The search was cancelled."""


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
        engine: all members that may take part, at least two, with strategy ``"adafuse"``. Of its
            options, those that are searched are not looked at; say them as `fixed` to keep them.
        task: how questions are put and answers read.
        questions: labelled; at least `FEWEST` for each part.
        metric: what is maximised; default: the task's main one.
        trials: settings of the ensemble that are tried. One that comes up again is not decoded
            again, nor is one that differs from it in name only.
        seed: of the division and of the search.
        held_out: share of the questions that the search does not see.
        within: points below the best score in which the setting that processes the fewest tokens
            is taken; 0 to take the best, and of equals the cheapest.
        fixed: options of `AdaFuseConfig` that are kept; ``members`` are those that may take part.
        header: comes before every question.
        form: how a question is put; None for the task's.
        chat: whether the prompt is sent as a message.
        known: what `log` was told in an earlier call; it is not decoded again, except for answers
            that failed of the run.
        log: told the answers of every setting that was decoded, as JSON-safe data.
        cancel: set it from anywhere to end with what was found so far.
        on_record: told of every answer, with the names of the members that gave it.
        on_trial: told of every setting on the search part, members alone first.

    Raises:
        InvalidInputError: too few members or questions, or a share that leaves too few; nothing
            was computed.
        InvalidOptionError: an option is unknown or out of range.
        MissingDependencyError: optuna is not installed.
    """
    fixed = _by_name(engine, fixed or {})
    allowed = fixed.get("use") or engine.config.use
    members = candidates(engine.members, allowed, engine.strategy.name)
    metric = metric or load_metric(task.metrics[0])
    search, test = divide(questions, held_out, seed)
    if trials < 1:
        raise InvalidOptionError(f"trials must be 1 or more; got {trials}")
    if not 0 <= within <= 100:
        raise InvalidOptionError(f"within must be from 0 to 100 points; got {within}")
    study = optimiser(seed)
    space = _Space(members, fixed)
    with singly(engine) as single:
        desk = _Desk(engine, single, task, metric, {"header": header, "form": form, "chat": chat})
        desk.recall(known)
        desk.log, desk.on_record = log or desk.log, on_record or desk.on_record
        desk.cancel = cancel or desk.cancel
        found = _Found(on_trial or (lambda _trial: None))
        try:
            for member in members:
                found.alone[member] = found.tell(desk.trial(search, {"use": [member]}))
            for start in space.starts(found.ranked):
                study.enqueue_trial(start, skip_if_exists=True)
            for _ in range(trials):
                asked = study.ask()
                done = found.tell(desk.trial(search, space.setting(asked)))
                study.tell(asked, done.score)
                found.tried.append(done)
            best, ensemble = found.ranked[0], cheapest(found.tried, within).options
            ours = desk.records(test, ensemble)
            theirs = desk.records(test, {"use": [best]})
        except _Stopped:
            if not found.tried:
                raise InvalidInputError(
                    "interrupted before a setting of the ensemble had been tried; nothing was found"
                ) from None
            ours = theirs = []
    tuning = Tuning(
        task=task.name,
        metric=metric.name,
        seed=seed,
        searched=len(search),
        held_out=len(test),
        alone=found.alone,
        trials=tuple(found.tried),
        best_member=found.ranked[0],
        ensemble=cheapest(found.tried, within).options,
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
    """Questions for the search and held-out ones, drawn at random, each in their order. What is
    asked twice is asked in one part only.

    Raises:
        InvalidInputError: one of the two is too small.
    """
    if not 0 < held_out < 1:
        raise InvalidOptionError(f"held_out must be between 0 and 1; got {held_out}")
    different = list(dict.fromkeys(_asked(each) for each in questions))
    size = round(len(different) * held_out)
    drawn = set(random.Random(seed).sample(different, size))  # noqa: S311
    search = [each for each in questions if _asked(each) not in drawn]
    test = [each for each in questions if _asked(each) in drawn]
    if min(len(search), len(test)) < FEWEST:
        raise InvalidInputError(
            f"too few questions: {len(questions)} give {len(search)} to search on and {len(test)} "
            f"held-out ones, and each part needs {FEWEST}. Use more questions (some hundred are "
            "needed to show a difference of a few points), or another share."
        )
    return search, test


def _asked(question: Question) -> tuple[str, ...]:
    return question.text.strip(), *(passage.text for passage in question.passages)


def cheapest(trials: Iterable[Trial], within: float = 0.0) -> Trial:
    """Of the trials at most `within` points below the best, the one that processes the fewest
    tokens; of equals the one of higher score, then the earlier.
    """
    trials = list(trials)
    bar = max(trial.score for trial in trials) - within - 1e-9
    return min(
        (trial for trial in trials if trial.score >= bar),
        key=lambda trial: (trial.tokens, -trial.score),
    )


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """One form for all settings that decode alike: weights relative to the largest, none where all
    are equal, and no option that has no effect beside the others.
    """
    kept = dict(options)
    weights = kept.pop("weights", None)
    if weights:
        most = max(weights.values())
        relative = {name: weight / most for name, weight in weights.items()}
        if set(relative.values()) != {1.0}:
            kept["weights"] = relative
    if kept.get("margin_threshold") == 0:  # always sure
        kept.pop("branching_factor", None)
    if kept.get("max_words") == kept.get("branching_factor") == 1:  # a word, sure or not
        kept.pop("margin_threshold", None)
    return kept


def _by_name(engine: AdaFuseEngine, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Fixed options, weights by name.

    Raises:
        InvalidOptionError: one is out of range, or there is not a weight for every member.
    """
    weights = engine.config.override(fixed).weights
    if weights is None or "weights" not in fixed:
        return dict(fixed)
    if isinstance(weights, tuple) and len(weights) == len(engine.members):
        weights = dict(zip(engine.members, weights, strict=True))
    taking_part = fixed.get("use") or engine.config.use or engine.members
    if isinstance(weights, tuple) or any(name not in weights for name in taking_part):
        raise InvalidOptionError(
            f"weights that are kept must be one number for each member ({', '.join(taking_part)}), "
            f"by name or in the order of all; got {fixed['weights']!r}"
        )
    if not any(weights[name] for name in taking_part):
        raise InvalidOptionError(f"weights leave none to the members ({', '.join(taking_part)})")
    return {**fixed, "weights": weights}


def candidates(
    members: Sequence[str], allowed: Sequence[str] | None = None, strategy: str = "adafuse"
) -> tuple[str, ...]:
    """Members that may take part, in order.

    Raises:
        InvalidInputError: there are too few, or the strategy has no options to search.
    """
    if strategy != "adafuse":
        raise InvalidInputError(f"only strategy 'adafuse' has options to tune; got {strategy!r}")
    found = tuple(name for name in members if name in (allowed or members))
    if len(found) < 2:
        raise InvalidInputError(
            f"tuning an ensemble needs at least two members; got {', '.join(found) or 'none'}"
        )
    return found


def optimiser(seed: int) -> optuna.Study:
    """What proposes settings.

    Raises:
        MissingDependencyError: optuna is not installed.
    """
    try:
        import optuna
    except ImportError as missing:
        raise MissingDependencyError(
            'tuning needs optuna: pip install "adafuse-llm[tune]"'
        ) from missing
    with _hushed(optuna):
        sampler = optuna.samplers.TPESampler(seed=seed)
        return optuna.create_study(direction="maximize", sampler=sampler)


@contextmanager
def _hushed(optuna: Any) -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


class _Space:
    """What is searched.

    Args:
        members: who may take part.
        fixed: options that are kept.
    """

    def __init__(self, members: Sequence[str], fixed: Mapping[str, Any]) -> None:
        weights = fixed.get("weights")
        self._sets = {
            "+".join(chosen): chosen
            for size in range(len(members), 1, -1)
            for chosen in itertools.combinations(members, size)
            if weights is None or any(weights[name] for name in chosen)
        }
        self._fixed = {name: value for name, value in fixed.items() if name != "use"}

    def starts(self, ranked: Sequence[str]) -> Iterator[dict[str, Any]]:
        """What is tried first: the defaults with all members and with the best two (the paper's
        Top-2), and both with one branch.
        """
        usual = AdaFuseConfig()
        best = set(ranked[:2])
        for branches in (usual.branching_factor, 1):
            for name, chosen in self._sets.items():
                if len(chosen) == len(ranked) or set(chosen) == best:
                    yield {
                        "use": name,
                        "margin_threshold": usual.margin_threshold,
                        "max_words": usual.max_words,
                        "branching_factor": branches,
                        **{f"weight of {member}": 1.0 for member in chosen},
                    }

    def setting(self, asked: optuna.Trial) -> dict[str, Any]:
        """The options that the optimiser asks about."""
        chosen = self._sets[asked.suggest_categorical("use", list(self._sets))]
        options: dict[str, Any] = {"use": list(chosen)}
        choices = {
            "margin_threshold": THRESHOLDS,
            "max_words": WORDS,
            "branching_factor": BRANCHES,
        }
        for name, values in choices.items():
            if name not in self._fixed:
                options[name] = asked.suggest_categorical(name, values)
        weights = self._fixed.get("weights")
        options |= self._fixed
        options["weights"] = {
            member: asked.suggest_categorical(f"weight of {member}", WEIGHTS)
            if weights is None
            else weights[member]
            for member in chosen
        }
        return canonical(options)


class _Found:
    """What a search has come to know."""

    def __init__(self, on_trial: Callable[[Trial], None]) -> None:
        self.alone: dict[str, Trial] = {}
        self.tried: list[Trial] = []
        self._on_trial = on_trial

    def tell(self, trial: Trial) -> Trial:
        self._on_trial(trial)
        return trial

    @property
    def ranked(self) -> list[str]:
        """Members, the best first; of equals the one that processes fewer tokens."""
        return sorted(self.alone, key=lambda n: (-self.alone[n].score, self.alone[n].tokens))


class _Desk:
    """Answers questions under settings, none twice.

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
        self._begun: dict[str, list[Record]] = {}
        self._lines: dict[str, int] = {}
        self.log: Callable[[dict[str, Any]], None] = lambda _line: None
        self.on_record: Callable[[str, Record], None] = lambda _name, _record: None
        self.cancel = threading.Event()

    def recall(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Take up what an earlier call has told its `log`."""
        for line in told:
            key, records = line["key"], [Record(**each) for each in line["records"]]
            self._lines[key] = line["line"]
            (self._begun if lost(records) else self._known)[key] = records

    def trial(self, questions: Sequence[Question], options: dict[str, Any]) -> Trial:
        """A setting on the search part."""
        known = _key(questions, options) in self._known
        records = self.records(questions, options)
        statistics = [record.statistics(self._metric) for record in records]
        spent = [tokens(record.usage) for record in records if record.usage is not None]
        return Trial(
            options=options,
            score=self._metric.score([sum(each) for each in zip(*statistics, strict=True)]),
            tokens=fmean(spent) if spent else 0.0,
            failed=sum(record.error is not None for record in records),
            known=known,
        )

    def records(self, questions: Sequence[Question], options: dict[str, Any]) -> list[Record]:
        """A setting's answers.

        Raises:
            _Stopped: before all were there.
        """
        key = _key(questions, options)
        if key not in self._known:
            done = self._begun.pop(key, [])
            new = self._decoded(unanswered(questions, done), options)
            self._known[key] = merged(done, new)
            said = [each.model_dump(mode="json", exclude_none=True) for each in self._known[key]]
            line = self._lines.setdefault(key, len(self._lines) + 1)
            self.log({"line": line, "key": key, "records": said})
        return self._known[key]

    def _decoded(self, questions: Sequence[Question], options: dict[str, Any]) -> list[Record]:
        name = "+".join(options["use"])
        alone = len(options["use"]) == 1
        answers = answer_all(
            self._single if alone else self._engine,
            self._task,
            questions,
            [self._metric],
            system=System(name, options if alone else {**_USUAL, **options}),
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


_USUAL = AdaFuseConfig().model_dump(include={*SEARCHED})
"""Over what the engine has as its own: a setting says all that is searched."""


def _key(questions: Sequence[Question], options: Mapping[str, Any]) -> str:
    return json.dumps([[each.number for each in questions], options], sort_keys=True)
