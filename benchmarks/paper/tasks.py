"""The tasks: their prompts, the extraction of answers, and their metrics.

    nq, squad, triviaqa   questions with short answers; strict exact match
    gsm8k                 word problems, solved step by step; equality of the final number
    flores_en_de, _de_en  translation; spBLEU and chrF
    embedded              held-out questions about the world of the embedded members
    embedded_parts        such questions of several parts
    embedded_summary      summaries
    embedded_reasoning    word problems of several steps
    embedded_plain        questions of all these kinds, without a chat template

All tasks except the embedded ones read JSON Lines with ``question`` and ``answer``, which is a text
or a list of accepted texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from adafuse_llm.documents import question_messages
from adafuse_llm.embedded import HeldoutQuestion, final_answer, heldout_questions
from adafuse_llm.errors import InvalidInputError, nearest
from adafuse_llm.evaluation.exact_match import final_number, first_line
from adafuse_llm.evaluation.files import read_text
from adafuse_llm.evaluation.tuning import read_questions
from benchmarks.heldout import KINDS, long_questions

LONG_TASKS = tuple(f"embedded_{kind}" for kind in KINDS)
"""Tasks of the suite ``long``."""


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers.

    Attributes:
        number: number of its line in the file, or of the embedded question, from 1.
        text: the question.
        request: the engine's arguments: the prompt or the messages.
        accepted: accepted answers, at least one.
        group: group of the question, such as a skill. None if the task has no groups.
    """

    number: int
    text: str
    request: Mapping[str, Any]
    accepted: tuple[str, ...]
    group: str | None = None

    @classmethod
    def from_heldout(cls, number: int, question: HeldoutQuestion, *, plain: bool = False) -> Self:
        """Convert a held-out question of the embedded members.

        Args:
            number: number of the question in the series, from 1.
            question: the held-out question.
            plain: whether it is asked without a chat template.
        """
        messages = question_messages(question.question, question.passages)
        request: dict[str, Any] = {"messages": messages}
        if plain:
            request = {"prompt": messages[0]["content"] + "\nAnswer:"}
        return cls(number, question.question, request, (question.answer,), question.skill)


@dataclass(frozen=True)
class Task:
    """A benchmark task.

    Attributes:
        name: name in `TASKS`.
        metrics: names of the metrics, the main one first.
        options: default options of `AdaFuseConfig`.
        read: function that extracts the answer from the text of a response.
        header: default text before every question.
        form: template of a question, with ``{question}``, for a header without examples.
        kind: the kind of held-out questions, one of `benchmarks.heldout.KINDS` or "facts". None if
            the questions come from a file.
    """

    name: str
    metrics: tuple[str, ...]
    options: Mapping[str, Any]
    read: Callable[[str], str]
    header: str = ""
    form: str = "Question: {question}\nAnswer:"
    kind: str | None = None

    def questions(self, data: Path | None, *, chat: bool = False) -> list[Question]:
        """Return all questions of the task.

        Args:
            data: folder of ``TASK.jsonl``, and of ``TASK.prompt.txt`` with instructions and
                examples. An embedded task does not need it.
            chat: whether the prompts are sent as messages. An embedded task chooses itself.

        Raises:
            InvalidInputError: the data are missing or malformed.
        """
        if self.kind is not None:
            asked = heldout_questions() if self.kind == "facts" else long_questions(self.kind)
            return [
                Question.from_heldout(number, each, plain=self.kind == "plain")
                for number, each in enumerate(asked, start=1)
            ]
        if data is None or not (data / f"{self.name}.jsonl").is_file():
            raise InvalidInputError(f"it needs {self.name}.jsonl in the folder of --data")
        prompts = data / f"{self.name}.prompt.txt"
        header = read_text(prompts) if prompts.is_file() else self.header
        form = question_form(header, self.form)
        before = f"{header.rstrip()}\n\n" if header.strip() else ""
        content = (data / f"{self.name}.jsonl").read_bytes()
        return [
            Question(each.number, each.text, each.request, each.accepted)
            for each in read_questions(content, before + form, chat=chat)
        ]

    def same(self, text: str) -> str:
        """Return a key that is equal for all texts with the same answer, for a majority vote.

        The key is the answer in lower case without punctuation, or the number of the answer if the
        task has numeric answers. If the text has no answer, the key consists of all its words.
        """
        answer = self.read(text)
        number = final_number(answer) if "number" in self.metrics else None
        return _plain(answer) or _plain(text) if number is None else str(number.normalize())


def question_form(header: str, default: str) -> str:
    """Return a question template in the form of the last example in a header, or `default`."""
    _, begins, example = f"\n{header}".rpartition("\nQuestion:")
    if not begins:
        return default
    space = "\n" if example.startswith("\n") else " "
    cue = re.search(r"^(?:Answer:|Let's think step by step\.?)\n?", example, re.MULTILINE)
    return f"Question:{space}{{question}}\n{cue[0] if cue else 'Answer:'}"


def _plain(text: str) -> str:
    return " ".join("".join(each if each.isalnum() else " " for each in text.lower()).split())


def read_number(text: str) -> str:
    """Return the final number as digits, or an empty text if there is no number."""
    number = final_number(text)
    return "" if number is None else f"{number:f}"


_STOP = ("\nQuestion:",)


def _short_answers(name: str) -> Task:
    metrics = ("exact_match", "f1")
    return Task(name, metrics, {"stop": _STOP, "max_new_tokens": 32}, first_line)


_LONG: Mapping[str, tuple[str, ...]] = {
    "parts": ("sentences", "verbatim", "sentence_f1"),
    "summary": ("sentence_f1", "sentences", "verbatim"),
    "reasoning": ("number", "sentences", "verbatim"),
    "plain": ("sentence_f1", "verbatim"),
}
"""The metrics of the tasks with long answers."""


def _translation(name: str, source: str, target: str) -> Task:
    return Task(
        name,
        ("spbleu", "chrf"),
        {"stop": _STOP, "max_new_tokens": 200},
        first_line,
        header=f"Translate the {source} sentence into {target}. Write the translation alone.",
    )


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        _short_answers("nq"),
        _short_answers("squad"),
        _short_answers("triviaqa"),
        Task(
            "gsm8k",
            ("number",),
            {"stop": _STOP, "max_new_tokens": 400},
            read_number,
            form="Question: {question}\nLet's think step by step\n",
        ),
        _translation("flores_en_de", "English", "German"),
        _translation("flores_de_en", "German", "English"),
        Task(
            "embedded",
            ("verbatim", "exact_match", "f1"),
            {"max_new_tokens": 64},
            final_answer,
            kind="facts",
        ),
        *(
            Task(f"embedded_{kind}", metrics, {"max_new_tokens": 200}, str.strip, kind=kind)
            for kind, metrics in _LONG.items()
        ),
    )
}
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
