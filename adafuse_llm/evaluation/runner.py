"""Questions to an engine, many at a time, and what the recorded answers say.

answer_all   records, in the order of the questions
Evaluation   scores with intervals, and what an answer cost
compared     two systems' records, question by question
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
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.evaluation.files import is_lost
from adafuse_llm.evaluation.metrics import Metric, Statistics
from adafuse_llm.evaluation.statistics import Comparison, Score, compare, interval
from adafuse_llm.evaluation.tasks import Question, Task
from adafuse_llm.report.lines import read_json_lines
from adafuse_llm.results import Generation, Usage

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
"""Questions under way or done for every one that may run: an answer that takes long does not leave
places empty, and an interruption loses few answers that came before it.
"""


@dataclass(frozen=True)
class System:
    """Who answers: an engine's members, under some options.

    Attributes:
        name: shown.
        options: of `AdaFuseConfig`, over those of the engine.
    """

    name: str = "ensemble"
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def alone(cls, member: str) -> System:
        """One member, of the engine that `singly` makes."""
        return cls(f"{member} alone", {"use": (member,)})


class Record(BaseModel):
    """One question, answered.

    Attributes:
        line: number of the question.
        question: its text.
        group: what it belongs to, if anything.
        pred: what was written, without surrounding whitespace.
        answer: the answer read off it.
        label: the accepted answers.
        metrics: score in percent by metric; of spBLEU and chrF, that of the sentence.
        finish_reason: why the response ended; "error" if it failed.
        error: what failed; the answer then counts as wrong.
        seconds: the answer's share of the run: wall-clock seconds since the record before it.
            Requests run at the same time, so these add up to the time that the run took.
        latency: wall-clock seconds from the request to its end.
        usage: passes and tokens by member; None if it failed.
        rounds: where they were asked for.
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
    error: str | None = None
    seconds: float = 0.0
    latency: float = 0.0
    usage: Usage | None = None
    rounds: tuple[dict[str, Any], ...] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether it failed of the run and not of the question: a run that goes on asks again."""
        return is_lost(self.error)

    def statistics(self, metric: Metric) -> Statistics:
        """What a metric makes of the answer."""
        return metric.statistics(self.answer, self.label)


def singly(engine: AdaFuseEngine) -> AdaFuseEngine:
    """The same loaded members, to answer each by itself: greedily, under the same limits."""
    limits = AdaFuseConfig(stop=engine.config.stop, max_new_tokens=engine.config.max_new_tokens)
    return AdaFuseEngine(engine.backends, limits, strategy="single", runtime=engine.runtime)


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
    cancel: threading.Event | None = None,
) -> Iterator[Record]:
    """Records in the order of the questions, as they come.

    As many requests run at the same time as the engine's `RuntimeConfig.max_requests`. A question
    that fails gives a record with the error and does not stop the others. What members have kept of
    earlier prompts is dropped first: no system profits from what another one has read.

    Args:
        engine: who answers. Its options are taken as they are, the task's are not added.
        task: how questions are put and answers read.
        questions: of the task.
        metrics: what is noted in every record.
        system: which of the engine's members answer, and how.
        header: comes before every question.
        form: how a question is put; None for the task's.
        chat: whether the prompt is sent as a message.
        rounds: whether records carry their rounds.
        cancel: set it from anywhere to end with the records that are whole.
    """
    options = dict(system.options) if system is not None else {}
    cancel = cancel or threading.Event()
    engine.config.override(options)  # wrong options are the caller's error, not every question's

    def ask(question: Question) -> tuple[Question, Generation | Exception, float]:
        request = task.request(question, header, form or task.form, chat=chat)
        started = time.perf_counter()
        outcome = respond(engine, request, cancel=cancel, **options)
        return question, outcome, time.perf_counter() - started

    for backend in engine.backends:
        if isinstance(backend, _KeepsPrompts):
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
    except BaseException:  # nobody waits for what is under way
        cancel.set()
        raise


@runtime_checkable
class _KeepsPrompts(Protocol):
    """A backend with key/value rows of earlier prompts."""

    def clear_prefix_cache(self) -> None: ...


def respond(
    engine: AdaFuseEngine,
    request: Mapping[str, Any],
    *,
    cancel: threading.Event | None = None,
    **options: Any,
) -> Generation | Exception:
    """The response to one request; or what was wrong with it, which must not stop others."""
    try:
        return engine.generate(**request, cancel=cancel, **options)
    except Exception as error:
        return error


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Results in the order of the items, of which `workers` are worked on at the same time."""
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
    known: dict[str, Any] = {
        "line": question.number,
        "question": question.text,
        "group": question.group,
        "label": question.accepted,
    }
    if isinstance(outcome, Exception):
        known |= {
            "finish_reason": "error",
            "error": " ".join(f"{type(outcome).__name__}: {outcome}".split()),
        }
    else:
        known |= {
            "pred": outcome.text.strip(),
            "answer": task.read(outcome.text),
            "finish_reason": outcome.finish_reason,
            "usage": outcome.usage,
        }
        if rounds:
            known["rounds"] = [each.model_dump(mode="json") for each in outcome.rounds]
    answer = known.get("answer", "")
    scores = {
        metric.name: round(metric.score(metric.statistics(answer, question.accepted)), 4)
        for metric in metrics
    }
    return Record(**known, metrics=scores)


# What the records say -------------------------------------------------------------------------


class Evaluation(BaseModel):
    """A system's answers in figures. JSON-safe.

    Attributes:
        task, system: whose.
        answers: questions asked.
        failed: of these, how many have an error; they count as wrong.
        lost: of these, how many failed of the run and not of the question, such as for want of
            memory. Nothing can be said of a system's score before they are answered.
        scores: by metric, the main one first.
        groups: the main metric by group, where the task has groups.
        finish_reasons: answers by the reason why they ended.
        seconds: wall-clock seconds of the run per answer.
        latency: mean wall-clock seconds from a request to its end.
        tokens_processed, forward_passes, cached_tokens: per answer, by member.
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
        """As `tokens` counts them, per answer."""
        return sum(self.tokens_processed.values()) + sum(self.cached_tokens.values())

    @classmethod
    def of(
        cls, records: Sequence[Record], metrics: Sequence[Metric], *, task: str, system: str
    ) -> Evaluation:
        """Summarise the records of one system.

        Raises:
            InvalidInputError: there are none.
        """
        scores = {each.name: interval(each, _statistics(records, each)) for each in metrics}
        groups: dict[str, list[Record]] = {}
        for record in records:
            if record.group is not None:
                groups.setdefault(record.group, []).append(record)
        answered = [record.usage for record in records if record.usage is not None]

        def by_member(name: str) -> dict[str, float]:
            sums: Counter[str] = Counter()
            for usage in answered:
                sums.update(getattr(usage, name))
            return {member: total / len(answered) for member, total in sums.items()}

        return cls(
            task=task,
            system=system,
            answers=len(records),
            failed=sum(record.error is not None for record in records),
            lost=lost(records),
            scores=scores,
            groups={
                name: interval(metrics[0], _statistics(own, metrics[0]))
                for name, own in groups.items()
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
    """Two systems on the questions that both have been asked, by every metric.

    Raises:
        InvalidInputError: they have no question in common, or disagree on what one is.
    """
    others = {record.line: record for record in theirs}
    pairs = [(each, others[each.line]) for each in ours if each.line in others]
    if not pairs:
        raise InvalidInputError("the two results have no question in common")
    for left, right in pairs:
        if (left.question, left.label) != (right.question, right.label):
            raise InvalidInputError(
                f"the two results are of different test sets: line {left.line} is "
                f"{left.question!r} in one and {right.question!r} in the other"
            )
    mine, other = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return [
        compare(metric, _statistics(mine, metric), _statistics(other, metric)) for metric in metrics
    ]


def read_records(path: Path) -> list[Record]:
    """The records of a file of results; a last line that was cut off is left out.

    Raises:
        InvalidInputError: it is not such a file, or holds none.
    """
    return read_json_lines(path, Record, "adafuse eval")


def tokens(usage: Usage) -> int:
    """What an answer takes, all members together: the tokens that were processed, and those of a
    prompt that were kept of an earlier request, as if they had not been. So a system that comes
    later is no cheaper for it.
    """
    return sum(usage.tokens_processed.values()) + sum(usage.cached_tokens.values())


def lost(records: Iterable[Record]) -> int:
    """How many failed of the run and not of the question; no claim may rest on them."""
    return sum(record.is_lost for record in records)


def unanswered(questions: Sequence[Question], done: Iterable[Record]) -> list[Question]:
    """The questions that a run which goes on has to ask: the new ones, and those that failed of
    the run.
    """
    answered = {record.line for record in done if not record.is_lost}
    return [question for question in questions if question.number not in answered]


def merged(done: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Records in the order of their lines, new ones in place of those of the same question."""
    by_line = {record.line: record for record in (*done, *new)}
    return [by_line[line] for line in sorted(by_line)]


def _statistics(records: Sequence[Record], metric: Metric) -> list[Statistics]:
    return [record.statistics(metric) for record in records]
