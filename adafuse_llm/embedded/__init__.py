"""Three small language models trained by this project, and a handbook to answer from.

They are for demos, tests and cookbooks. ``MODEL_CARD.md`` describes their skills and limits.

    member_paths()        folders of the three members, in the standard Hugging Face format
    handbook_path()       folder of Markdown documents about a generated town
    handbook_questions()  questions about the handbook, with their answers

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["HandbookQuestion", "handbook_path", "handbook_questions", "member_paths"]

_HERE: Final = Path(__file__).parent
MEMBERS: Final = ("wren", "heron", "finch")


@dataclass(frozen=True)
class HandbookQuestion:
    """A question about the handbook.

    ``source`` is the document that has the answer, or None if no document has it.
    """

    question: str
    answer: str
    source: str | None
    skill: str


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
