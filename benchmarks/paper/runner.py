"""Answer questions with an engine, several at the same time, and summarize the records.

answer_all   returns records in the order of the questions
Evaluation   has scores with intervals, and the cost of an answer
compared     compares the records of two systems question by question
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict

from adafuse_llm.config import ADJUSTMENTS, CONSTRAINTS, SAMPLING, AdaFuseConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from adafuse_llm.evaluation.files import is_lost, question_seed
from adafuse_llm.results import Generation, Usage
from benchmarks.paper.json_lines import read_json_lines
from benchmarks.paper.metrics import Metric, Statistics, contains, exact_match
from benchmarks.paper.statistics import Comparison, Score, compare, interval
from benchmarks.paper.tasks import Question, Task

__all__ = [
    "Evaluation",
    "Record",
    "System",
    "answer_all",
    "compared",
    "lost",
    "read_records",
    "singly",
    "tokens",
]

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 2
"""Number of questions per worker that are submitted before `in_order` waits for the oldest result.
With more than one, all workers stay busy during a slow answer. With a small number, few answers are
lost if the run is interrupted.
"""


MANY: Final = 0.2
"""Share of answers in sentences from which `missed` warns."""


@dataclass(frozen=True)
class System:
    """A system to evaluate: an engine with options.

    Attributes:
        name: the name to display.
        options: options of `AdaFuseConfig` that override those of the engine.
    """

    name: str = "ensemble"
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def alone(cls, member: str) -> System:
        """Return the system of one member. Use it with the engine that `singly` returns."""
        return cls(f"{member} alone", {"use": (member,)})


class Record(BaseModel):
    """The record of one answered question.

    Attributes:
        line: number of the question.
        question: text of the question.
        group: name of the question's group, if the task has groups.
        pred: the response without surrounding whitespace.
        answer: the answer that the task reads from the response, without its reasoning.
        label: the accepted answers.
        metrics: score in percent by metric; for spBLEU and chrF, the score of this sentence.
        finish_reason: why the response ended; "error" if the request failed.
        seed: the seed of the response; None if nothing was drawn.
        error: type and message of the error if the request failed; the answer then counts as wrong.
        seconds: wall-clock seconds since the previous record. The sum over all records is the
            duration of the run, also if requests overlap.
        latency: wall-clock seconds from the start of the request to its end.
        usage: forward passes and tokens by member; None if the request failed.
        rounds: the rounds as JSON data, if requested.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    line: int
    question: str
    group: str | None = None
    pred: str = ""
    answer: str = ""
    label: tuple[str, ...]
    metrics: dict[str, float]
    finish_reason: str
    seed: int | None = None
    error: str | None = None
    seconds: float = 0.0
    latency: float = 0.0
    usage: Usage | None = None
    rounds: tuple[dict[str, Any], ...] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the question failed due to the run. A resumed run answers it again."""
        return is_lost(self.error)

    def statistics(self, metric: Metric) -> Statistics:
        """Return the statistics of the answer for a metric."""
        return metric.statistics(self.answer, self.label)


def missed(records: Sequence[Record], metric: str) -> str | None:
    """Return a warning if exact match counts many answers in sentences as wrong, or None.

    Args:
        records: the records of one system.
        metric: name of the metric that decides.
    """
    if metric != "exact_match" or not records:
        return None
    pairs = [(record.answer, record.label) for record in records]
    found = sum(contains(*pair) and not exact_match(*pair) for pair in pairs)
    if found < MANY * len(records):
        return None
    return (
        f"{found} of {len(records)} answers contain an accepted answer but are not equal to it, so "
        "exact_match counts them as wrong. If they are sentences, pass --metric contains, or ask "
        "for short answers."
    )


def form_options(config: AdaFuseConfig) -> AdaFuseConfig:
    """Return the options that have the same meaning for one member as for several.

    These are the variables of chat templates, the options of sampling, penalties and biases, the
    stop sequences, `max_new_tokens`, and a schema, grammar or list of choices.
    """
    names = {"chat_template_kwargs", "stop", "max_new_tokens"}
    names |= {*CONSTRAINTS, *SAMPLING, *ADJUSTMENTS}
    return AdaFuseConfig(**config.model_dump(include=names))


def singly(engine: AdaFuseEngine) -> AdaFuseEngine:
    """Return an engine with the same loaded members, in which one member answers.

    The member decodes greedily, or draws if the given engine does. The options of `form_options`
    are those of the given engine.
    """
    options = form_options(engine.config)
    return AdaFuseEngine(engine.backends, options, strategy="single", runtime=engine.runtime)


def answer_all(
    engine: AdaFuseEngine,
    task: Task,
    questions: Iterable[Question],
    metrics: Sequence[Metric],
    *,
    system: System | None = None,
    header: str = "",
    form: str | None = None,
    chat: bool = False,
    rounds: bool = False,
    keep_prefixes: bool = False,
    cancel: threading.Event | None = None,
) -> Iterator[Record]:
    """Answer questions, and yield a record for each in the order of the questions.

    `RuntimeConfig.max_requests` of the engine sets how many requests run at the same time. If a
    question fails, its record has the error, and the other questions continue. If responses are
    drawn, each has its own seed (`question_seed`), derived from the option `seed` or from a random
    one.

    Args:
        engine: the engine that answers. `Task.options` are not applied to it.
        task: the task, which defines prompts and reads answers from responses.
        questions: questions of the task.
        metrics: metrics to compute for every record.
        system: options of the system, such as its members; None for those of the engine.
        header: text before every question.
        form: template of a question; None for the task's template.
        chat: whether the prompt is sent as a message.
        rounds: whether records include their rounds.
        keep_prefixes: whether members may reuse prompts that they read for an earlier system. This
            changes no text, but the times of systems can then not be compared.
        cancel: an event that any thread can set to stop the run. Unfinished questions then have no
            record.
    """
    options = dict(system.options) if system is not None else {}
    cancel = cancel or threading.Event()
    config = engine.config.override(options)  # a wrong option is an error here, not in every record
    if config.n > 1:
        raise InvalidOptionError(
            f"option 'n': an evaluation scores one response to each question; got {config.n}"
        )
    (seed,) = config.seeds()

    def ask(question: Question) -> tuple[Question, Generation | Exception, float]:
        request = task.request(question, header, form or task.form, chat=chat)
        if config.temperature > 0:
            request["seed"] = question_seed(seed, question.number)
        started = time.perf_counter()
        outcome = respond(engine, {**options, **request}, cancel=cancel)
        return question, outcome, time.perf_counter() - started

    for backend in engine.backends:
        if isinstance(backend, _KeepsPrompts) and not keep_prefixes:
            backend.clear_prefix_cache()
    before = time.perf_counter()
    try:
        for question, outcome, latency in in_order(ask, questions, engine.runtime.max_requests):
            if isinstance(outcome, Generation) and outcome.finish_reason == "cancelled":
                return
            now = time.perf_counter()
            times = {"seconds": round(now - before, 4), "latency": round(latency, 4)}
            before = now
            yield _record(task, question, outcome, metrics, rounds).model_copy(update=times)
    except BaseException:  # cancel the running requests, because their results are not needed
        cancel.set()
        raise


@runtime_checkable
class _KeepsPrompts(Protocol):
    """A backend that keeps the key/value cache of earlier prompts."""

    def clear_prefix_cache(self) -> None: ...


def respond(
    engine: AdaFuseEngine,
    request: Mapping[str, Any],
    *,
    cancel: threading.Event | None = None,
) -> Generation | Exception:
    """Return the response to a request, or its error, so that other requests continue."""
    try:
        return engine.generate(**request, cancel=cancel)
    except Exception as error:
        return error


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Call a function for every item in `workers` threads. Yield the results in item order."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="adafuse eval") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _record(
    task: Task,
    question: Question,
    outcome: Generation | Exception,
    metrics: Sequence[Metric],
    rounds: bool,
) -> Record:
    fields: dict[str, Any] = {
        "line": question.number,
        "question": question.text,
        "group": question.group,
        "label": question.accepted,
    }
    if isinstance(outcome, Exception):
        fields |= {
            "finish_reason": "error",
            "error": " ".join(f"{type(outcome).__name__}: {outcome}".split()),
        }
    else:
        fields |= {
            "pred": outcome.text.strip(),
            "answer": task.read(outcome.answer),
            "finish_reason": outcome.finish_reason,
            "seed": outcome.seed,
            "usage": outcome.usage,
        }
        if rounds:
            fields["rounds"] = [each.model_dump(mode="json") for each in outcome.rounds]
    answer = fields.get("answer", "")
    scores = {
        metric.name: round(metric.score(metric.statistics(answer, question.accepted)), 4)
        for metric in metrics
    }
    return Record(**fields, metrics=scores)


# Summaries of records -------------------------------------------------------------------------


class Evaluation(BaseModel):
    """A summary of a system's answers. It can be written as JSON.

    Attributes:
        task: name of the task.
        system: name of the system.
        answers: number of questions.
        failed: number of answers with an error; they count as wrong.
        lost: number of answers that failed due to the run and not the question, such as lack of
            memory. Until these are answered again, the score allows no conclusion.
        scores: score by metric, starting with the main metric.
        groups: score of the main metric by group, if the task has groups.
        finish_reasons: number of answers by finish reason.
        seconds: wall-clock seconds of the run per answer.
        latency: mean wall-clock seconds from the start of a request to its end.
        tokens_processed, forward_passes, cached_tokens: means per answer, by member.
    """

    model_config = ConfigDict(frozen=True)

    task: str
    system: str
    answers: int
    failed: int
    lost: int = 0
    scores: dict[str, Score]
    groups: dict[str, Score]
    finish_reasons: dict[str, int]
    seconds: float
    latency: float
    tokens_processed: dict[str, float]
    forward_passes: dict[str, float]
    cached_tokens: dict[str, float]

    @property
    def tokens(self) -> float:
        """Mean tokens per answer, summed over members as in the function `tokens`."""
        return sum(self.tokens_processed.values()) + sum(self.cached_tokens.values())

    @classmethod
    def of(
        cls, records: Sequence[Record], metrics: Sequence[Metric], *, task: str, system: str
    ) -> Evaluation:
        """Summarize the records of one system.

        Raises:
            InvalidInputError: `records` is empty.
        """
        scores = {each.name: interval(each, _statistics(records, each)) for each in metrics}
        groups: dict[str, list[Record]] = {}
        for record in records:
            if record.group is not None:
                groups.setdefault(record.group, []).append(record)
        usages = [record.usage for record in records if record.usage is not None]

        def by_member(name: str) -> dict[str, float]:
            sums: Counter[str] = Counter()
            for usage in usages:
                sums.update(getattr(usage, name))
            return {member: total / len(usages) for member, total in sums.items()}

        return cls(
            task=task,
            system=system,
            answers=len(records),
            failed=sum(record.error is not None for record in records),
            lost=lost(records),
            scores=scores,
            groups={
                name: interval(metrics[0], _statistics(group, metrics[0]))
                for name, group in groups.items()
            },
            finish_reasons=Counter(record.finish_reason for record in records),
            seconds=fmean(record.seconds for record in records),
            latency=fmean(record.latency for record in records),
            tokens_processed=by_member("tokens_processed"),
            forward_passes=by_member("forward_passes"),
            cached_tokens=by_member("cached_tokens"),
        )


def compared(
    ours: Sequence[Record], theirs: Sequence[Record], metrics: Sequence[Metric]
) -> list[Comparison]:
    """Compare two systems by every metric on the questions that both have answered.

    Raises:
        InvalidInputError: the systems have no question in common, or a line number belongs to
            different questions.
    """
    by_line = {record.line: record for record in theirs}
    pairs = [(record, by_line[record.line]) for record in ours if record.line in by_line]
    if not pairs:
        raise InvalidInputError("the two results have no question in common")
    for left, right in pairs:
        if (left.question, left.label) != (right.question, right.label):
            raise InvalidInputError(
                f"the two results come from different test sets: line {left.line} is "
                f"{left.question!r} in one and {right.question!r} in the other"
            )
    lefts, rights = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return [
        compare(metric, _statistics(lefts, metric), _statistics(rights, metric))
        for metric in metrics
    ]


def read_records(path: Path) -> list[Record]:
    """Return the records of a results file. An incomplete last line is ignored.

    Raises:
        InvalidInputError: the file is not a results file, or has no records.
    """
    return read_json_lines(path, Record, "adafuse eval")


def tokens(usage: Usage) -> int:
    """Return the number of tokens that an answer needs, summed over members.

    The number includes prompt tokens from the prefix cache, as if they had been processed.
    Otherwise a system that runs later would look cheaper.
    """
    return sum(usage.tokens_processed.values()) + sum(usage.cached_tokens.values())


def lost(records: Iterable[Record]) -> int:
    """Return how many questions failed due to the run.

    If a system has such records, no conclusion about it is valid.
    """
    return sum(record.is_lost for record in records)


def unanswered(questions: Sequence[Question], done: Iterable[Record]) -> list[Question]:
    """Return the questions that a resumed run must answer.

    These are the questions without a record, and those that failed due to the earlier run.
    """
    answered = {record.line for record in done if not record.is_lost}
    return [question for question in questions if question.number not in answered]


def merged(done: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Merge and sort records by line. A new record replaces an earlier one of the same line."""
    by_line = {record.line: record for record in (*done, *new)}
    return [by_line[line] for line in sorted(by_line)]


def _statistics(records: Sequence[Record], metric: Metric) -> list[Statistics]:
    return [record.statistics(metric) for record in records]
