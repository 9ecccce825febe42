"""Decode the answers of a suite, each of them once. An interrupted run can be resumed.

Every system has one file of records per task. Rows with the same key are one system. A part with
fewer questions uses the first records of the file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from adafuse_llm.calibration import features
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.evaluation.files import Results
from adafuse_llm.evaluation.parallel import in_order
from adafuse_llm.evaluation.tuning import LASTING
from adafuse_llm.strategies.base import refuse_unused_options
from benchmarks.paper.metrics import Metric, Statistics, load_metric
from benchmarks.paper.suites import PAPER_TASKS, Part, Row, Suite
from benchmarks.paper.tasks import Question, Task, load_task
from benchmarks.peers import NAMED, MajorityVote


class Record(BaseModel):
    """The record of one answered question.

    Attributes:
        line: number of the question.
        question: text of the question.
        group: name of the question's group, if the task has groups.
        answer: the answer that the task reads from the response, without its reasoning.
        label: the accepted answers.
        finish_reason: why the response ended; "error" if the request failed.
        error: type and message of the error if the request failed; the answer then counts as wrong.
        seconds: wall-clock seconds since the previous record. The sum over all records is the
            duration of the run, also if requests overlap.
        tokens: tokens of all members. Those of the prompt count also if the members still had them
            from an earlier request.
        prompt_tokens: tokens of the prompt among them.
        passes: forward passes of all members.
        rounds: number of rounds.
        features: what a calibration reads (`adafuse_llm.calibration.features`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    line: int
    question: str
    group: str | None = None
    answer: str = ""
    label: tuple[str, ...]
    finish_reason: str = "error"
    error: str | None = None
    seconds: float = 0.0
    tokens: int | None = None
    prompt_tokens: int | None = None
    passes: int | None = None
    rounds: int | None = None
    features: tuple[float, ...] | None = None

    def statistics(self, metric: Metric) -> Statistics:
        """Return the statistics of the answer for a metric."""
        return metric.statistics(self.answer, self.label)


@dataclass(frozen=True)
class Work:
    """A task with its questions and metrics.

    Attributes:
        task: the task.
        questions: the questions.
        metrics: the metrics, the main one first.
        chat: whether prompts are sent as messages.
    """

    task: Task
    questions: Sequence[Question]
    metrics: Sequence[Metric]
    chat: bool

    def size(self, part: Part, suite: Suite) -> int:
        """Return the number of questions of a part."""
        wanted: int = getattr(suite.questions, part.size)
        return min(len(self.questions), wanted)


def load_work(suite: Suite, data: Path | None) -> tuple[dict[str, Work], dict[str, str]]:
    """Load the tasks of a suite. A task without data, or without the questions, is left out.

    Args:
        suite: the suite.
        data: folder of ``TASK.jsonl`` and ``TASK.prompt.txt``. None for the embedded questions.

    Returns:
        The tasks by name, and the reasons why other tasks are left out, by name.

    Raises:
        InvalidInputError: a task or metric does not exist, or all tasks are left out.
        ImportError: a metric needs a package that is not installed.
    """
    works: dict[str, Work] = {}
    absent: dict[str, str] = {}
    for name in suite.tasks or (PAPER_TASKS if data is not None else ("embedded",)):
        task = load_task(name)
        first, last = suite.ranges.get(name, (1, None))
        try:
            questions = task.questions(data, chat=suite.chat)[first - 1 : last]
        except InvalidInputError as error:
            absent[name] = str(error)
            continue
        if not questions:
            absent[name] = f"it has no question {first}"
            continue
        metrics = [load_metric(each) for each in suite.metrics.get(name, task.metrics)]
        works[name] = Work(task, questions, metrics, suite.chat)
    if not works:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise InvalidInputError(f"no task can be run. {reasons}")
    return works, absent


class Interrupted(Exception):  # noqa: N818
    """The run was interrupted. The files hold the answers so far."""


class Runner:
    """A runner of systems, which reads existing records and decodes the missing ones.

    Args:
        engine: the engine with all members.
        folder: folder of the records.
        identity: fields that must be equal to resume a run, in addition to the task, the questions
            and the options.
        cancel: an event that any thread can set to stop the run.
        on_record: called with every new record after it is written to its file.
    """

    def __init__(
        self,
        engine: AdaFuseEngine,
        folder: Path,
        identity: Mapping[str, Any],
        *,
        cancel: threading.Event | None = None,
        on_record: Callable[[Record], object] = lambda _record: None,
    ) -> None:
        self._engine, self._folder, self._identity = engine, folder, identity
        self._cancel, self._on_record = cancel or threading.Event(), on_record

    def refusal(self, row: Row) -> str | None:
        """Return why the members cannot decode with a row, or None.

        Raises:
            InvalidOptionError: the strategy or an option does not exist.
        """
        config = AdaFuseConfig(**self._options(row, {}))
        chosen = config.use or self._engine.members
        backends = [each for each in self._engine.backends if each.name in chosen]
        view = self._engine.with_strategy(NAMED.get(row.strategy, row.strategy))
        refuse_unused_options(view.strategy, config)
        try:
            view.strategy.check(backends)
        except InvalidInputError as error:
            return str(error)
        return None

    def records(self, row: Row, work: Work, size: int, *, timed: bool = False) -> list[Record]:
        """Decode the missing records of a system, and return all its records.

        Args:
            row: the system.
            work: the task.
            size: number of questions, the first ones of the task.
            timed: whether questions run one at a time.

        Raises:
            Interrupted: `cancel` was set before all records were complete.
            InvalidInputError: the file holds records of another run.
        """
        options = self._options(row, work.task.options)
        questions = work.questions[:size]
        name = f"{row.key}{'_timed' if timed else ''}.jsonl"
        results = Results(self._folder / work.task.name / name)
        identity = {
            **self._identity,
            "task": work.task.name,
            "chat": work.chat,
            "first question": work.questions[0].number,
            "strategy": row.strategy,
            **AdaFuseConfig(**options).model_dump(mode="json"),
        }

        with results.resumed(identity) as known:
            done = {each["line"]: Record(**each) for each in known}
            todo = [each for each in questions if each.number not in done]
            for record in self._decode(row, work.task, options, todo, timed):
                results.append(record.model_dump(mode="json", exclude_none=True))
                done[record.line] = record
                self._on_record(record)
        if any(question.number not in done for question in questions):
            raise Interrupted
        return [done[question.number] for question in questions]

    def _options(self, row: Row, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, **({} if row.use is None else {"use": row.use}), **row.options}

    def _decode(
        self, row: Row, task: Task, options: Mapping[str, Any], todo: list[Question], timed: bool
    ) -> Iterator[Record]:
        """Yield the records of questions in their order, without those that are cancelled."""
        engine = self._engine.with_strategy(NAMED.get(row.strategy, row.strategy))
        if isinstance(engine.strategy, MajorityVote):  # it compares answers instead of texts
            engine.strategy = MajorityVote(key=task.same)
        for backend in engine.backends:  # no system may use the prompts that another one read
            if callable(clear := getattr(backend, "clear_prefix_cache", None)):
                clear()
        answer = partial(self._answer, engine, task, options)
        running = takewhile(lambda _question: not self._cancel.is_set(), todo)
        before = time.perf_counter()
        for record in in_order(answer, running, 1 if timed else engine.runtime.max_requests):
            if record is not None:
                now = time.perf_counter()
                yield record.model_copy(update={"seconds": round(now - before, 4)})
                before = now

    def _answer(
        self, engine: AdaFuseEngine, task: Task, options: Mapping[str, Any], question: Question
    ) -> Record | None:
        """Return the record of a question, or None if the run was interrupted."""
        record = Record(
            line=question.number,
            question=question.text,
            group=question.group,
            label=question.accepted,
        )
        try:
            done = engine.generate(**question.request, **options, cancel=self._cancel)
        except LASTING as error:
            return record.model_copy(update={"error": f"{type(error).__name__}: {error}"})
        if done.finish_reason == "cancelled":
            return None
        usage = done.usage
        return record.model_copy(
            update={
                "answer": task.read(done.answer),
                "finish_reason": done.finish_reason,
                "tokens": sum(usage.tokens_processed.values()) + sum(usage.cached_tokens.values()),
                "prompt_tokens": sum(usage.prompt_tokens.values()),
                "passes": sum(usage.forward_passes.values()),
                "rounds": len(done.rounds),
                "features": features(done, [*usage.prompt_tokens]),
            }
        )
