"""Three small language models of this project, with documents and questions for them.

They are for experiments, tests and cookbooks. ``MODEL_CARD.md`` describes what they can do.
Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from adafuse_llm.documents import Passage

__all__ = [
    "HandbookQuestion",
    "HeldoutQuestion",
    "final_answer",
    "handbook_path",
    "handbook_questions",
    "heldout_questions",
    "member_paths",
]

_HERE: Final = Path(__file__).parent
MEMBERS: Final = ("wren", "heron", "finch")


@dataclass(frozen=True)
class HandbookQuestion:
    """A question about the handbook.

    ``source`` names the document with the answer. It is None if no document has it.
    """

    question: str
    answer: str
    source: str | None
    skill: str


@dataclass(frozen=True)
class HeldoutQuestion:
    """A question that is not in the members' training data.

    One of the ``passages`` holds the answer, unless it is ``not stated``. Arithmetic needs none.
    """

    question: str
    answer: str
    skill: str
    passages: tuple[Passage, ...]


def member_paths() -> tuple[Path, ...]:
    """Return the folders of the embedded members, always in the same order."""
    return tuple(_HERE / "members" / name for name in MEMBERS)


def handbook_path() -> Path:
    """Return the folder of the handbook's Markdown documents."""
    return _HERE / "handbook"


def handbook_questions() -> tuple[HandbookQuestion, ...]:
    """Return the questions of ``handbook/questions.jsonl``, in file order."""
    text = (handbook_path() / "questions.jsonl").read_text(encoding="utf-8")
    return tuple(HandbookQuestion(**json.loads(line)) for line in text.splitlines() if line)


def heldout_questions(limit: int | None = None) -> tuple[HeldoutQuestion, ...]:
    """Return the held-out questions, at most the first `limit`. Their skills alternate.

    A question asks for one fact, or is a word problem of one or two steps. The members' training
    data has neither the names and values of these facts nor these problems.
    """
    file = _HERE / "heldout.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).decode("utf-8").splitlines()
    questions = [json.loads(line) for line in lines[:limit]]
    for question in questions:
        question["passages"] = tuple(Passage(**passage) for passage in question["passages"])
    return tuple(HeldoutQuestion(**question) for question in questions)


def final_answer(text: str) -> str:
    """Return the answer in a reply, without whitespace around it or a period at its end.

    It is the text after the last ``The answer is``, or the whole reply if that phrase is absent.
    """
    return text.rsplit("The answer is", 1)[-1].strip().removesuffix(".").strip()
