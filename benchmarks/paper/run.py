"""What a suite has to decode, each answer once, resumable.

Every system has a file of records per task. Rows of the same strategy, options and members are one
system, and a part that asks fewer questions reads the first of its records.
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
from adafuse_llm.evaluation.metrics import Metric, load_metric
from adafuse_llm.evaluation.runner import Record, answer_all, merged, unanswered
from adafuse_llm.evaluation.tasks import Question, Task, load_task, strategy_identity
from adafuse_llm.strategies.base import Strategy
from benchmarks.paper.layout import PAPER_TASKS, Part, Row, Suite, settled

ENDLESS = range(1, 10**9)
"""Numbers of the embedded questions: answers to any of them stay in a file."""

WARM_UP = 1
"""Questions that come before those that are timed."""


@dataclass(frozen=True)
class Work:
    """A task with its questions, prompts and metrics.

    Attributes:
        numbers: of all questions that there are, in order; those asked are the first of them.
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
    """A system on the first questions of a task.

    Attributes:
        task: its name.
        row: the system.
        questions: how many.
        timed: whether one question is answered at a time.
    """

    task: str
    row: Row
    questions: int
    timed: bool = False

    @property
    def rounds(self) -> bool:
        """Whether records carry their rounds."""
        return self.row.strategy == "adafuse" and not self.timed

    @property
    def name(self) -> tuple[str, str, bool]:
        """What it is known by."""
        return self.task, self.row.key, self.timed

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        key = self.row.key
        safe = re.sub(r"[^\w.=+-]+", "_", key)
        if re.search(r"[^\w.=+ -]", key):  # another key could give the same name
            safe += f"_{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        return folder / self.task / f"{safe}{'_timed' if self.timed else ''}.jsonl"


Answers = Mapping[tuple[str, str, bool], Sequence[Record]]
"""Records by the name of their job."""


def load_work(
    suite: Suite,
    data: Path | None,
    *,
    tasks: Sequence[str] = (),
    metrics: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Work], dict[str, str]]:
    """The tasks of a suite, by name, and what is left out, with the reason.

    Args:
        suite: what it asks for.
        data: folder of ``TASK.jsonl`` and ``TASK.prompt.txt``; None for the embedded questions.
        tasks: only these.
        metrics: come first where a task has them.
        options: of `AdaFuseConfig`, over those of every task.

    Raises:
        InvalidInputError: there is no such folder, task or metric, or a file that cannot be used.
        MissingDependencyError: a metric needs what is not there.
    """
    names = tuple(tasks) or suite.tasks or (PAPER_TASKS if data is not None else ("embedded",))
    if data is not None and not data.is_dir():
        raise InvalidInputError(f"--data {data}: there is no such folder of TASK.jsonl files")
    for name in metrics:
        load_metric(name)
        if not any(name in _metric_names(suite, load_task(each)) for each in names):
            raise InvalidInputError(
                f"--metric {name}: none of the tasks of this suite ({', '.join(names)}) has it; a "
                "suite file can give a task other metrics"
            )
    if data is not None and not any(load_task(each).reads_file for each in names):
        raise InvalidInputError(
            f"--data {data}: {', '.join(names)} makes its own questions; leave --data out"
        )
    works: dict[str, Work] = {}
    absent: dict[str, str] = {}
    for name in names:
        task = load_task(name)
        if task.reads_file and data is None:
            raise InvalidInputError(f"task {name!r} needs --data: a folder with {name}.jsonl")
        if task.reads_file and data is not None and not (data / f"{name}.jsonl").is_file():
            absent[name] = f"{name}.jsonl is not in --data"
            continue
        works[name] = _work(suite, task, data, metrics, options or {})
    if not works:
        files = " or ".join(f"{each}.jsonl" for each in names)
        raise InvalidInputError(f"--data {data} holds no task: it needs {files}")
    return works, absent


def _work(
    suite: Suite,
    task: Task,
    data: Path | None,
    preferred: Sequence[str],
    options: Mapping[str, Any],
) -> Work:
    content = header = None
    sizes = suite.questions
    most = max(sizes.table, sizes.sweep, sizes.time + WARM_UP)
    if task.reads_file and data is not None:
        file, prompts = data / f"{task.name}.jsonl", data / f"{task.name}.prompt.txt"
        content = file.read_bytes()
        header = read_text(prompts) if prompts.is_file() else None
        try:
            questions = task.questions(content)
        except InvalidInputError as error:
            raise InvalidInputError(f"{file}: {error}") from error
    else:
        questions = task.questions(limit=most)
    before, form = task.header_and_form(header)
    own = _metric_names(suite, task)
    names = list(dict.fromkeys([*(each for each in preferred if each in own), *own]))
    limits = suite.max_new_tokens.get(task.name)
    return Work(
        task=task,
        questions=questions,
        numbers=[each.number for each in questions] if task.reads_file else ENDLESS,
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
        },
    )


def _metric_names(suite: Suite, task: Task) -> tuple[str, ...]:
    return suite.metrics.get(task.name, task.metrics)


def _metrics(names: Sequence[str], preferred: Sequence[str]) -> list[Metric]:
    """The metrics; of a task whose main one was chosen, those that cannot be had are left out."""
    found = []
    for place, name in enumerate(names):
        try:
            found.append(load_metric(name))
        except AdaFuseError:
            if place == 0 or not preferred:
                raise
    return found


def jobs_of(parts: Sequence[Part], suite: Suite, works: Mapping[str, Work]) -> list[Job]:
    """What has to be decoded for these parts, each answer once."""
    jobs: dict[tuple[str, str, bool], Job] = {}
    for part in parts:
        for task, work in works.items():
            for row in part.rows:
                timed = part.size == "time"
                count = asked(part, suite, work) + (WARM_UP if timed else 0)
                count = min(count, len(work.questions))
                job = Job(task, row, count, timed)
                known = jobs.setdefault(job.name, job)
                jobs[job.name] = replace(known, questions=max(known.questions, count))
    return list(jobs.values())


def asked(part: Part, suite: Suite, work: Work) -> int:
    """How many questions of a task a part asks."""
    there = len(work.questions) - (WARM_UP if part.size == "time" else 0)
    wanted: int = getattr(suite.questions, part.size)
    return max(1, min(there, wanted))


class Cancelled(Exception):  # noqa: N818
    """A job was cancelled; the records so far are in its file."""


class Runner:
    """Decodes jobs, or reads what is there.

    Args:
        engine: gives the engine with all members; called when it is first needed.
        folder: of the records.
        works: the tasks, by name.
        suite: for how many questions run at the same time.
        identity: what must be the same for a run to be resumed, besides tasks and options.
        members: names of those that take part; None for all.
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
        """Why a row has to be left out: it is optional and not there, or its strategy cannot
        decode with these members.

        Raises:
            InvalidOptionError: there is no such strategy or option, and the row is not optional.
            InvalidInputError: the folder holds records of something else.
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
        """Refuse members that there are not, and weights that do not fit, before anything is
        decoded.
        """
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
        """Records that are there, and questions that are not answered yet."""
        work, identity = self._works[job.task], self._identity_of(job, config)
        found = self._results(job).done(identity, work.numbers)
        done = [Record(**each) for each in found]
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
            "max_requests": self._at_once(job),
            **config.model_dump(mode="json"),
        }

    def missing(self, job: Job) -> int:
        """How many questions of a job are not answered yet."""
        return len(self._done(job, self._settled(job)[1])[1])

    def records(
        self,
        job: Job,
        *,
        cancel: threading.Event | None = None,
        came: Callable[[Record], object] = lambda _: None,
    ) -> list[Record]:
        """The records of a job.

        Args:
            job: what to decode.
            cancel: set it from anywhere to end with what is there.
            came: called with every record that was not there before, once it is in the file.

        Raises:
            Cancelled: before all were there.
        """
        strategy, config = self._settled(job)
        done, todo = self._done(job, config)
        if todo:
            results, new = self._results(job), []
            results.begin(self._identity_of(job, config), afresh=not done)
            runtime = RuntimeConfig(max_requests=self._at_once(job))
            backends = self._engine().backends
            with AdaFuseEngine(backends, config, strategy=strategy, runtime=runtime) as engine:
                for record in self._decode(job, engine, todo, cancel):
                    results.append(record.model_dump(mode="json", exclude_none=True))
                    new.append(record)
                    came(record)
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
            cancel=cancel,
        )

    def _at_once(self, job: Job) -> int:
        return 1 if job.timed else self._suite.max_requests


def chosen_members(engine: AdaFuseEngine, names: Sequence[str] | None) -> tuple[str, ...]:
    """The members that take part, in the engine's order.

    Raises:
        InvalidInputError: there is no member of such a name.
    """
    for name in names or ():
        if name not in engine.members:
            raise InvalidInputError(
                f"--use: there is no member {name!r}.{nearest(name, engine.members)} "
                f"Members: {', '.join(engine.members)}."
            )
    return tuple(each for each in engine.members if names is None or each in names)
