"""The benchmark tasks: their prompts, the extraction of answers, and their metrics.

    nq, squad, triviaqa   questions with short answers; strict exact match
    gsm8k                 word problems, solved step by step; equality of the final number
    flores_en_de, _de_en  translation; spBLEU and chrF
    embedded              held-out questions about the world of the embedded members
    embedded_parts        such questions of several parts
    embedded_summary      summaries
    embedded_reasoning    word problems of several steps
    embedded_plain        questions of all these kinds, without a chat template

All tasks except the embedded ones read JSON Lines with ``question`` and ``answer``. An answer is a
text or a list of accepted texts. These tasks have a header before every question: a text with
instructions and examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from adafuse_llm.documents import Passage, question_messages
from adafuse_llm.embedded import (
    HELDOUT_KINDS,
    HeldoutKind,
    HeldoutQuestion,
    final_answer,
    heldout_questions,
)
from adafuse_llm.errors import InvalidInputError, nearest
from adafuse_llm.evaluation.files import QUESTION_FORM, put, question_form, read_lines
from adafuse_llm.reasoning import REASONING_CLOSES, REASONING_OPENS, split_reasoning
from adafuse_llm.strategies.base import Strategy
from adafuse_llm.strategies.registry import find_strategy
from adafuse_llm.strategies.rivals.vote import MajorityVote, plain
from benchmarks.paper.metrics import final_number

__all__ = ["Question", "Task", "embedded_questions", "load_task"]

EMBEDDED_QUESTIONS = 300
"""Default number of embedded questions: 50 of each skill, or all questions with long answers."""


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers.

    Attributes:
        number: number of its line in the file, or of the embedded question, from 1.
        text: the question.
        accepted: accepted answers, at least one.
        group: group of the question, such as a skill. None if the task has no groups.
        passages: passages in the prompt, for embedded questions only.
    """

    number: int
    text: str
    accepted: tuple[str, ...]
    group: str | None = None
    passages: tuple[Passage, ...] = ()

    @classmethod
    def from_heldout(cls, number: int, question: HeldoutQuestion) -> Question:
        """Convert a held-out question of the embedded members.

        Args:
            number: number of the question in the series, from 1.
            question: the held-out question.
        """
        accepted = (question.answer,)
        return cls(number, question.question, accepted, question.skill, question.passages)


@dataclass(frozen=True)
class Task:
    """A benchmark task.

    Attributes:
        name: name in `TASKS`.
        about: description in one line.
        metrics: names of the metrics, the main one first.
        options: default options of `AdaFuseConfig`.
        read: function that extracts the answer from the text of a response.
        header: default text before every question.
        form: template of a question, with ``{question}``, for a header without examples.
        kind: the kind of held-out questions. None if the questions come from a file.
    """

    name: str
    about: str
    metrics: tuple[str, ...]
    options: Mapping[str, Any]
    read: Callable[[str], str]
    header: str = ""
    form: str = QUESTION_FORM
    kind: HeldoutKind | None = None

    @property
    def reads_file(self) -> bool:
        """Whether the questions come from a file."""
        return self.kind is None

    def questions(self, data: bytes | None = None, limit: int | None = None) -> list[Question]:
        """Return the questions of the task, or the first `limit` of them.

        Args:
            data: content of a JSON Lines file. None for a task that does not read a file.
            limit: largest number of questions. None stands for all questions of a file, or for
                `EMBEDDED_QUESTIONS` in an embedded task.

        Raises:
            InvalidInputError: the data are missing, not allowed or malformed, or an embedded task
                has fewer questions than `limit`.
        """
        if self.kind is not None:
            if data is not None:
                raise InvalidInputError(f"task {self.name!r} has its own questions: omit --data")
            return embedded_questions(EMBEDDED_QUESTIONS if limit is None else limit, self.kind)
        if data is None:
            raise InvalidInputError(
                f"task {self.name!r} needs --data: a JSON Lines file with question and answer"
            )
        lines = read_lines(data)[:limit]
        questions = []
        for line in lines:
            accepted = (line.label,) if isinstance(line.label, str) else line.label
            problem = line.problem or self._problem(accepted)
            if problem:
                raise InvalidInputError(f"line {line.number} of the test set: {problem}")
            questions.append(Question(line.number, line.question or "", tuple(accepted)))
        return questions

    def _problem(self, accepted: object) -> str | None:
        if not isinstance(accepted, list | tuple) or not accepted:
            return 'its "answer" must be a text or a list of texts'
        if not all(isinstance(each, str) and each.strip() for each in accepted):
            return 'its "answer" must hold texts that are not empty'
        if "number" in self.metrics and all(final_number(each) is None for each in accepted):
            return 'its "answer" holds no number'
        return None

    def header_and_form(self, header: str | None, template: str | None = None) -> tuple[str, str]:
        """Return the text before every question, and the template of a question.

        Args:
            header: the text before every question. If None, the header of the task is used.
            template: the template, with ``{question}``. If None, the form of the examples in the
                header is used, or the form of the task if the header has no examples.

        Raises:
            InvalidInputError: the task does not accept a header or template, or the template lacks
                ``{question}``.
        """
        if not self.reads_file and (header is not None or template is not None):
            raise InvalidInputError(
                f"task {self.name!r} has its own prompts: omit --prompts and --template"
            )
        header = self.header if header is None else header
        form = question_form(header, self.form) if template is None else template
        if "{question}" not in form:
            raise InvalidInputError(f"the template must contain {{question}}; got {template!r}")
        return (f"{header.rstrip()}\n\n" if header.strip() else ""), form

    def same(self, text: str) -> str:
        """Return a key that is equal for all texts with the same answer.

        The key is the answer in lower case without punctuation, or the number of the answer if the
        task has numeric answers. If the text has no answer, the key consists of all its words.
        Reasoning at the beginning of the text does not count.
        """
        text = _without_reasoning(text)
        answer = self.read(text)
        number = final_number(answer) if "number" in self.metrics else None
        return plain(answer) or plain(text) if number is None else str(number.normalize())

    def fitted(self, strategy: Strategy) -> Strategy:
        """Adapt a strategy to this task: a majority vote compares answers instead of texts."""
        if isinstance(strategy, MajorityVote) and strategy.key is plain:
            return MajorityVote(key=self.same)
        return strategy

    def request(
        self, question: Question, header: str, form: str, *, chat: bool = False
    ) -> dict[str, Any]:
        """Return the engine's arguments for a question: its ``prompt`` or its ``messages``.

        Args:
            question: a question of this task.
            header: the text before the question.
            form: the template of a question.
            chat: whether to send the prompt as a user message, which every member reads in its own
                chat template. Embedded questions are always messages, except those of
                ``embedded_plain``, which are prompts.
        """
        if self.kind is not None:
            messages = question_messages(question.text, question.passages)
            if self.kind == "plain":
                return {"prompt": messages[0]["content"] + "\nAnswer:"}
            return {"messages": messages}
        return put(header + form.replace("{question}", question.text), chat=chat)


def _without_reasoning(text: str) -> str:
    """Return a reply without its reasoning, which a chat template may have opened."""
    opened = REASONING_CLOSES in text and REASONING_OPENS not in text
    return split_reasoning(text, REASONING_OPENS if opened else "")[1]


def strategy_identity(name: str) -> dict[str, str]:
    """Return the fields that must be equal for recorded answers of a strategy to be reused.

    They include how a majority vote compares answers (`Task.fitted`).

    Raises:
        InvalidOptionError: the strategy does not exist.
    """
    votes = isinstance(find_strategy(name), MajorityVote)
    return {"strategy": name, **({"votes": "answers as the task reads them"} if votes else {})}


def embedded_questions(
    limit: int | None = EMBEDDED_QUESTIONS, kind: HeldoutKind = "facts"
) -> list[Question]:
    """Return the first held-out questions of a kind, or all if `limit` is None. Skills take turns.

    Their names, values and problems do not occur in the members' training data.

    Raises:
        InvalidInputError: `limit` is higher than the number of questions.
    """
    questions = enumerate(heldout_questions(limit, kind), 1)
    return [Question.from_heldout(number, each) for number, each in questions]


def first_line(text: str) -> str:
    """Return the first line that is not blank. Base models write more after their answer."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def read_number(text: str) -> str:
    """Return the final number as digits, or an empty text if there is no number."""
    number = final_number(text)
    return "" if number is None else f"{number:f}"


_STOP = ("\nQuestion:",)


def _short_answers(name: str, about: str) -> Task:
    return Task(
        name=name,
        about=about,
        metrics=("exact_match", "f1", "lenient_match"),
        options=MappingProxyType({"stop": _STOP, "max_new_tokens": 32}),
        read=first_line,
    )


_LONG: Mapping[HeldoutKind, tuple[str, tuple[str, ...]]] = {
    "parts": ("questions of several parts", ("sentences", "verbatim", "sentence_f1")),
    "summary": ("summaries", ("sentence_f1", "sentences", "verbatim")),
    "reasoning": ("word problems of three to five steps", ("number", "sentences", "verbatim")),
    "plain": ("questions without a chat template", ("sentence_f1", "verbatim")),
}
"""What the tasks with long answers ask, and their metrics."""


def _long_answers(kind: HeldoutKind) -> Task:
    about, metrics = _LONG[kind]
    return Task(
        name=f"embedded_{kind}",
        about=f"{about}, held out, for the members that come with the package",
        metrics=metrics,
        options=MappingProxyType({"max_new_tokens": 200}),
        read=str.strip,
        kind=kind,
    )


def _translation(name: str, source: str, target: str) -> Task:
    return Task(
        name=name,
        about=f"{source} sentences into {target} (FLORES)",
        metrics=("spbleu", "chrf"),
        options=MappingProxyType({"stop": _STOP, "max_new_tokens": 200}),
        read=first_line,
        header=f"Translate the {source} sentence into {target}. Write the translation alone.",
    )


_ALL: Sequence[Task] = (
    _short_answers("nq", "questions that people typed into a search engine (Natural Questions)"),
    _short_answers("squad", "questions about a passage of an encyclopedia (SQuAD)"),
    _short_answers("triviaqa", "quiz questions (TriviaQA)"),
    Task(
        name="gsm8k",
        about="word problems, step by step (GSM8K)",
        metrics=("number", "lenient_number"),
        options=MappingProxyType({"stop": _STOP, "max_new_tokens": 400}),
        read=read_number,
        form="Question: {question}\nLet's think step by step\n",
    ),
    _translation("flores_en_de", "English", "German"),
    _translation("flores_de_en", "German", "English"),
    Task(
        name="embedded",
        about="held-out questions of six skills for the members that come with the package",
        metrics=("verbatim", "exact_match", "f1"),
        options=MappingProxyType({"max_new_tokens": 64}),
        read=final_answer,
        kind="facts",
    ),
    *(_long_answers(kind) for kind in HELDOUT_KINDS if kind != "facts"),
)

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ALL})
"""Every task by its name."""


def load_task(name: str) -> Task:
    """Return the task with the given name.

    Raises:
        InvalidInputError: the name is unknown.
    """
    if name not in TASKS:
        raise InvalidInputError(
            f"there is no task {name!r}.{nearest(name, TASKS)} Tasks: {', '.join(TASKS)}."
        )
    return TASKS[name]
