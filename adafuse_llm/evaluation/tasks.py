"""The benchmarks: how a question is put, how the answer is read, which metrics count.

    nq, squad, triviaqa   questions with short answers; strict exact match
    gsm8k                 word problems, step by step; the final number
    flores_en_de, _de_en  translation; spBLEU and chrF
    embedded              held-out questions about the embedded members' own world

All but the last read JSON Lines with ``question`` and ``answer`` (a text, or a list of accepted
ones) and take a header, a text with instructions and examples that comes before every question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from adafuse_llm.documents import Passage, question_messages
from adafuse_llm.embedded import HeldoutQuestion, final_answer, heldout_questions
from adafuse_llm.errors import InvalidInputError, nearest
from adafuse_llm.evaluation.files import QUESTION_FORM, put, question_form, read_lines
from adafuse_llm.evaluation.metrics import final_number
from adafuse_llm.strategies.base import Strategy
from adafuse_llm.strategies.registry import find_strategy
from adafuse_llm.strategies.vote import MajorityVote, plain

EMBEDDED_QUESTIONS = 300
"""How many are used where no limit is given: 50 of each skill."""


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers.

    Attributes:
        number: line in its file, or place in the series, from 1.
        text: the question.
        accepted: at least one.
        group: what it belongs to, such as a skill; None where a task has no groups.
        passages: what it is asked about (`embedded`).
    """

    number: int
    text: str
    accepted: tuple[str, ...]
    group: str | None = None
    passages: tuple[Passage, ...] = ()

    @classmethod
    def from_heldout(cls, number: int, question: HeldoutQuestion) -> Question:
        """A question for the embedded members, with its place in the series."""
        accepted = (question.answer,)
        return cls(number, question.question, accepted, question.skill, question.passages)


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Attributes:
        name: as in `TASKS`.
        about: in a line.
        metrics: names of its metrics, the main one first.
        options: of `AdaFuseConfig`, where the caller says nothing else.
        read: the answer proper, from what was written.
        header: comes before every question where the user gives none.
        form: how a question is put, with ``{question}``, where the header has no examples.
        reads_file: whether its questions come from a file.
    """

    name: str
    about: str
    metrics: tuple[str, ...]
    options: Mapping[str, Any]
    read: Callable[[str], str]
    header: str = ""
    form: str = QUESTION_FORM
    reads_file: bool = field(default=True)

    def questions(self, data: bytes | None = None, limit: int | None = None) -> list[Question]:
        """The first questions, `limit` at most.

        Args:
            data: JSON Lines; None for a task that comes with its questions.
            limit: how many; None for all (`embedded`: `EMBEDDED_QUESTIONS`).

        Raises:
            InvalidInputError: the data are missing, not wanted, or malformed; or the task comes
                with fewer questions than `limit`.
        """
        if not self.reads_file:
            if data is not None:
                raise InvalidInputError(f"task {self.name!r} makes its own questions: no --data")
            return embedded_questions(EMBEDDED_QUESTIONS if limit is None else limit)
        if data is None:
            raise InvalidInputError(
                f"task {self.name!r} needs --data: a file of JSON lines with question and answer"
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
        """What comes before every question, and how it is put.

        Args:
            header: the user's text; None for the task's own.
            template: with ``{question}``; None for the form of the header's examples, or else
                the task's.

        Raises:
            InvalidInputError: the task takes no header, or the template has no place for the
                question.
        """
        if not self.reads_file and (header is not None or template is not None):
            raise InvalidInputError(
                f"task {self.name!r} has prompts of its own: no --prompts and no --template"
            )
        header = self.header if header is None else header
        form = question_form(header, self.form) if template is None else template
        if "{question}" not in form:
            raise InvalidInputError(f"the template must contain {{question}}; got {template!r}")
        return (f"{header.rstrip()}\n\n" if header.strip() else ""), form

    def same(self, text: str) -> str:
        """What texts have in common that give the same answer: what is read off them, without case
        and punctuation, or as a number where a number is asked for; of a text that gives none, all
        its words.
        """
        answer = self.read(text)
        found = final_number(answer) if "number" in self.metrics else None
        return plain(answer) or plain(text) if found is None else str(found.normalize())

    def fitted(self, strategy: Strategy) -> Strategy:
        """The strategy as it is used for this task: a majority vote counts answers, not texts."""
        if isinstance(strategy, MajorityVote) and strategy.key is plain:
            return MajorityVote(key=self.same)
        return strategy

    def request(
        self, question: Question, header: str, form: str, *, chat: bool = False
    ) -> dict[str, Any]:
        """What an engine is asked: its ``prompt`` or ``messages``.

        Args:
            question: of this task.
            header: comes before it.
            form: how it is put.
            chat: whether the prompt is sent as a user's message, which every member reads in its
                own template. ``embedded`` always asks by messages.
        """
        if not self.reads_file:
            return {"messages": question_messages(question.text, question.passages)}
        return put(header + form.replace("{question}", question.text), chat=chat)


def strategy_identity(name: str) -> dict[str, str]:
    """What tells a strategy's answers to a task from those of others, `Task.fitted` included.

    Raises:
        InvalidOptionError: there is no such strategy.
    """
    votes = isinstance(find_strategy(name), MajorityVote)
    return {"strategy": name, **({"votes": "answers as the task reads them"} if votes else {})}


def embedded_questions(limit: int = EMBEDDED_QUESTIONS) -> list[Question]:
    """The first of the held-out questions that ship with the package, one of each skill in turn.

    Names, values and problems are of the held-out split: none occurred in the members' training.

    Raises:
        InvalidInputError: `limit` is higher than the number of questions.
    """
    questions = enumerate(heldout_questions(limit), 1)
    return [Question.from_heldout(number, each) for number, each in questions]


def first_line(text: str) -> str:
    """The first line that says something; base models go on after their answer."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def read_number(text: str) -> str:
    """The final number as digits; empty if there is none."""
    found = final_number(text)
    return "" if found is None else f"{found:f}"


_STOP = ("\nQuestion:",)


def _short_answers(name: str, about: str) -> Task:
    return Task(
        name=name,
        about=about,
        metrics=("exact_match", "f1", "lenient_match"),
        options=MappingProxyType({"stop": _STOP, "max_new_tokens": 32}),
        read=first_line,
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
        reads_file=False,
    ),
)

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ALL})
"""Every task by its name."""


def load_task(name: str) -> Task:
    """A task by its name.

    Raises:
        InvalidInputError: there is none of that name.
    """
    if name not in TASKS:
        raise InvalidInputError(
            f"there is no task {name!r}.{nearest(name, TASKS)} Tasks: {', '.join(TASKS)}."
        )
    return TASKS[name]
