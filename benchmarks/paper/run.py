"""Decode the answers of a suite, each of them once. An interrupted run can be resumed.

Every system has one file of records per task. Rows with the same strategy, options and members are
one system. A part with fewer questions uses the first records of the file.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adafuse_llm.config import AdaFuseConfig, RuntimeConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import AdaFuseError, InvalidInputError, nearest
from adafuse_llm.evaluation.files import Results, read_text
from adafuse_llm.strategies.base import Strategy
from benchmarks.paper.layout import PAPER_TASKS, Part, Row, Suite, settled
from benchmarks.paper.metrics import Metric, load_metric
from benchmarks.paper.runner import Record, answer_all, merged, unanswered
from benchmarks.paper.tasks import (
    Question,
    Task,
    embedded_questions,
    load_task,
    strategy_identity,
)

WARM_UP = 1
"""Number of questions that are answered before the timed ones, and not counted."""


@dataclass(frozen=True)
class Work:
    """A task with its questions, prompts and metrics.

    Attributes:
        task: the task.
        questions: the questions.
        numbers: numbers of all questions that a file of records may hold, in order.
        metrics: the metrics, the main one first.
        header: the text before every question.
        form: the template of a question.
        options: options of `AdaFuseConfig` for the task.
        identity: fields of the task that must be equal to resume a run.
    """

    task: Task
    questions: Sequence[Question]
    numbers: Sequence[int]
    metrics: Sequence[Metric]
    header: str
    form: str
    options: Mapping[str, Any]
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """The first questions of a task, to be answered by one system.

    Attributes:
        task: name of the task.
        row: the system.
        questions: number of questions.
        timed: whether questions run one at a time, to measure time.
    """

    task: str
    row: Row
    questions: int
    timed: bool = False

    def first(self, questions: int) -> Job:
        """Return the job of at most this number of its questions."""
        return replace(self, questions=min(self.questions, questions))

    @property
    def rounds(self) -> bool:
        """Whether the records include the rounds."""
        return self.row.strategy == "adafuse" and not self.timed

    @property
    def name(self) -> tuple[str, str, bool]:
        """Key of the job: the task, the row's key, and whether it is timed."""
        return self.task, self.row.key, self.timed

    def path(self, folder: Path) -> Path:
        """Return the file of the job's records."""
        key = self.row.key
        safe = re.sub(r"[^\w.=+-]+", "_", key)
        if re.search(r"[^\w.=+ -]", key):  # distinguishes keys with equal safe names
            safe += f"_{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        return folder / self.task / f"{safe}{'_timed' if self.timed else ''}.jsonl"


Answers = Mapping[tuple[str, str, bool], Sequence[Record]]
"""Records by `Job.name`."""


def load_work(
    suite: Suite,
    data: Path | None,
    *,
    tasks: Sequence[str] = (),
    metrics: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Work], dict[str, str]]:
    """Load the tasks of a suite. A task without data, or without the questions, is left out.

    Args:
        suite: the suite.
        data: folder of ``TASK.jsonl`` and ``TASK.prompt.txt``. None for the embedded questions.
        tasks: names of tasks. If given, they replace the tasks of the suite.
        metrics: metrics to put first for the tasks that have them.
        options: options of `AdaFuseConfig`. They override those of every task.

    Returns:
        The tasks by name, and the reasons why other tasks are left out, by name.

    Raises:
        InvalidInputError: a folder, task or metric does not exist, a file is invalid, or all tasks
            are left out.
        MissingDependencyError: a metric needs a package that is not installed.
    """
    names = tuple(tasks) or suite.tasks or (PAPER_TASKS if data is not None else ("embedded",))
    if data is not None and not data.is_dir():
        raise InvalidInputError(f"--data {data}: the folder of TASK.jsonl files does not exist")
    for name in metrics:
        load_metric(name)
        if not any(name in _metric_names(suite, load_task(each)) for each in names):
            raise InvalidInputError(
                f"--metric {name}: none of the tasks of this suite ({', '.join(names)}) has this "
                "metric. A suite file can set other metrics for a task."
            )
    if data is not None and not any(load_task(each).reads_file for each in names):
        raise InvalidInputError(
            f"--data {data}: task {', '.join(names)} has its own questions: omit --data"
        )
    works: dict[str, Work] = {}
    absent: dict[str, str] = {}
    for name in names:
        task = load_task(name)
        if task.reads_file and data is None:
            absent[name] = f"it needs --data, a folder with {name}.jsonl"
        elif task.reads_file and data is not None and not (data / f"{name}.jsonl").is_file():
            absent[name] = f"{name}.jsonl is not in the folder of --data"
        elif work := _work(suite, task, data, metrics, options or {}):
            works[name] = work
        else:
            absent[name] = f"it has no question {suite.asked(name).start + 1}"
    if not works:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise InvalidInputError(f"no task can be run. {reasons}")
    return works, absent


def _work(
    suite: Suite,
    task: Task,
    data: Path | None,
    preferred: Sequence[str],
    options: Mapping[str, Any],
) -> Work | None:
    """Return a task, or None if it does not have the first question of the suite."""
    content = header = None
    if task.kind is not None:
        questions = embedded_questions(None, task.kind)
    else:
        assert data is not None  # the task is left out otherwise
        file, prompts = data / f"{task.name}.jsonl", data / f"{task.name}.prompt.txt"
        content = file.read_bytes()
        header = read_text(prompts) if prompts.is_file() else None
        try:
            questions = task.questions(content)
        except InvalidInputError as error:
            raise InvalidInputError(f"{file}: {error}") from error
    asked = suite.asked(task.name)
    if not questions[asked]:
        return None
    before, form = task.header_and_form(header)
    own = _metric_names(suite, task)
    names = list(dict.fromkeys([*(each for each in preferred if each in own), *own]))
    limits = suite.max_new_tokens.get(task.name)
    return Work(
        task=task,
        questions=questions[asked],
        numbers=[each.number for each in questions[asked.start :]],
        metrics=_metrics(names, preferred),
        header=before,
        form=form,
        options={**task.options, **({"max_new_tokens": limits} if limits else {}), **options},
        identity={
            "task": task.name,
            "test set": "embedded" if content is None else hashlib.sha256(content).hexdigest(),
            "prompts": hashlib.sha256(before.encode()).hexdigest(),
            "template": form,
            **({"chat": True} if suite.chat and task.reads_file else {}),
            **({"first question": asked.start + 1} if asked.start else {}),
        },
    )


def _metric_names(suite: Suite, task: Task) -> tuple[str, ...]:
    return suite.metrics.get(task.name, task.metrics)


def _metrics(names: Sequence[str], preferred: Sequence[str]) -> list[Metric]:
    """Load metrics. If some are preferred, leave out later ones that cannot be loaded."""
    metrics = []
    for place, name in enumerate(names):
        try:
            metrics.append(load_metric(name))
        except AdaFuseError:
            if place == 0 or not preferred:
                raise
    return metrics


def jobs_of(parts: Sequence[Part], suite: Suite, works: Mapping[str, Work]) -> list[Job]:
    """Return the jobs of the parts. Parts that use the same answers share a job."""
    jobs: dict[tuple[str, str, bool], Job] = {}
    for part in parts:
        for task, work in works.items():
            for row in part.rows:
                timed = part.size == "time"
                count = question_count(part, suite, work) + (WARM_UP if timed else 0)
                count = min(count, len(work.questions))
                job = Job(task, row, count, timed)
                known = jobs.setdefault(job.name, job)
                jobs[job.name] = replace(known, questions=max(known.questions, count))
    return list(jobs.values())


def question_count(part: Part, suite: Suite, work: Work) -> int:
    """Return the number of questions of a task in a part."""
    available = len(work.questions) - (WARM_UP if part.size == "time" else 0)
    requested: int = getattr(suite.questions, part.size)
    return max(1, min(available, requested))


class Cancelled(Exception):  # noqa: N818
    """Raised if a job is cancelled. The file of the job holds the records so far."""


class Runner:
    """A runner of jobs, which reads existing records and decodes the missing ones.

    Args:
        engine: function that returns the engine with all members. It is called when the engine is
            first needed.
        folder: folder of the records.
        works: the tasks, by name.
        suite: the suite, for its number of concurrent questions.
        identity: further fields that must be equal to resume a run. The fields of the task and the
            options are always compared.
        members: names of the members that take part. None for all.
    """

    def __init__(
        self,
        engine: Callable[[], AdaFuseEngine],
        folder: Path,
        works: Mapping[str, Work],
        suite: Suite,
        *,
        identity: Mapping[str, Any],
        members: Sequence[str] | None = None,
    ) -> None:
        self._engine, self._folder, self._works = engine, folder, works
        self._suite, self._identity, self._members = suite, identity, members

    def refusal(self, job: Job) -> str | None:
        """Return the reason to leave out the row of a job, or None.

        A row is left out if its strategy cannot decode with these members, or if it is optional and
        invalid.

        Raises:
            InvalidOptionError: the row is not optional, and its strategy or option does not exist.
            InvalidInputError: the row is not optional, and its members or weights are invalid; or
                the folder holds records of another run.
        """
        try:
            strategy, config = self._settled(job)
            self._check_members(job, config)
        except AdaFuseError as error:
            if not job.row.optional:
                raise
            return str(error)
        if not self._done(job, config)[1]:
            return None
        chosen = config.use
        backends = [
            each for each in self._engine().backends if chosen is None or each.name in chosen
        ]
        try:
            strategy.check(backends)
        except InvalidInputError as error:
            return str(error)
        return None

    def _check_members(self, job: Job, config: AdaFuseConfig) -> None:
        """Check the names of members and the weights of a row before anything is decoded."""
        named = job.row.use or {"use", "weights"} & set(job.row.options)
        if not named or not self._done(job, config)[1]:
            return
        try:
            AdaFuseEngine(self._engine().backends, config, strategy=job.row.strategy).close()
        except InvalidInputError as error:
            raise InvalidInputError(f"row {job.row.name!r}: {error}") from error

    def _settled(self, job: Job) -> tuple[Strategy, AdaFuseConfig]:
        members = job.row.use or self._members
        work = self._works[job.task]
        strategy, config = settled(job.row, {**work.options, "use": members})
        return work.task.fitted(strategy), config

    def _done(self, job: Job, config: AdaFuseConfig) -> tuple[list[Record], Sequence[Question]]:
        """Return the existing records, and the questions without an answer."""
        work, identity = self._works[job.task], self._identity_of(job, config)
        results = self._results(job).done(identity, work.numbers)
        done = [Record(**result) for result in results]
        return done, unanswered(work.questions[: job.questions], done)

    def _results(self, job: Job) -> Results:
        return Results(job.path(self._folder), "Pass another --output, or delete that file.")

    def _identity_of(self, job: Job, config: AdaFuseConfig) -> dict[str, Any]:
        return {
            **self._identity,
            **self._works[job.task].identity,
            "metrics": [metric.name for metric in self._works[job.task].metrics],
            **strategy_identity(job.row.strategy),
            "rounds": job.rounds,
            "max_requests": self._max_requests(job),
            **config.model_dump(mode="json"),
        }

    def missing(self, job: Job) -> int:
        """Return the number of questions of a job that have no answer yet."""
        return len(self._done(job, self._settled(job)[1])[1])

    def records(
        self,
        job: Job,
        *,
        keep_prefixes: bool = False,
        cancel: threading.Event | None = None,
        on_record: Callable[[Record], object] = lambda _: None,
    ) -> list[Record]:
        """Decode the missing records of a job, and return all its records.

        Args:
            job: the job.
            keep_prefixes: as for `answer_all`.
            cancel: event that stops decoding. Any thread may set it.
            on_record: called with every new record after it is written to the file.

        Raises:
            Cancelled: `cancel` was set before all records were complete.
        """
        strategy, config = self._settled(job)
        done, todo = self._done(job, config)
        if todo:
            results = self._results(job)
            with results.lock():
                # another process may have written records before this one had the lock
                done, todo = self._done(job, config)
                new = []
                results.begin(self._identity_of(job, config), afresh=not done)
                runtime = RuntimeConfig(max_requests=self._max_requests(job))
                backends = self._engine().backends
                with AdaFuseEngine(backends, config, strategy=strategy, runtime=runtime) as engine:
                    for record in self._decode(job, engine, todo, keep_prefixes, cancel):
                        results.append(record.model_dump(mode="json", exclude_none=True))
                        new.append(record)
                        on_record(record)
                if len(new) < len(todo):
                    raise Cancelled
                results.tidy()
            done = merged(done, new)
        return done[: job.questions]

    def _decode(
        self,
        job: Job,
        engine: AdaFuseEngine,
        todo: Sequence[Question],
        keep_prefixes: bool,
        cancel: threading.Event | None,
    ) -> Iterator[Record]:
        work = self._works[job.task]
        return answer_all(
            engine,
            work.task,
            todo,
            work.metrics,
            header=work.header,
            form=work.form,
            chat=self._suite.chat,
            rounds=job.rounds,
            keep_prefixes=keep_prefixes,
            cancel=cancel,
        )

    def _max_requests(self, job: Job) -> int:
        return 1 if job.timed else self._suite.max_requests


def chosen_members(engine: AdaFuseEngine, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the members that take part, in the engine's order.

    Raises:
        InvalidInputError: no member has one of the names.
    """
    for name in names or ():
        if name not in engine.members:
            raise InvalidInputError(
                f"--use: there is no member {name!r}.{nearest(name, engine.members)} "
                f"Members: {', '.join(engine.members)}."
            )
    return tuple(each for each in engine.members if names is None or each in names)
