"""Three small language models of this project, with documents and questions for them.

They are for experiments, tests and cookbooks. ``MODEL_CARD.md`` describes what they can do.

    member_paths()        folders of the three members, in standard Hugging Face format
    handbook_path()       folder of Markdown documents about a generated town
    handbook_questions()  questions about the handbook, with their answers
    heldout_questions()   questions with passages that are not in the training data: of six skills,
                          or with long answers
    final_answer(text)    the answer in a member's reply

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from adafuse_llm.documents import Passage
from adafuse_llm.errors import InvalidInputError, nearest

__all__ = [
    "HELDOUT_KINDS",
    "HandbookQuestion",
    "HeldoutKind",
    "HeldoutQuestion",
    "final_answer",
    "handbook_path",
    "handbook_questions",
    "heldout_questions",
    "member_paths",
]

_HERE: Final = Path(__file__).parent
MEMBERS: Final = ("wren", "heron", "finch")
HELDOUT: Final = _HERE / "heldout.jsonl.gz"
HELDOUT_LONG: Final = _HERE / "heldout_long.jsonl.gz"
"""Files of the held-out questions."""

HeldoutKind = Literal["facts", "parts", "summary", "reasoning", "plain"]
"""Kinds of held-out questions.

    facts      questions about one fact, and word problems of one or two steps
    parts      questions of two to four parts, answered in a sentence for each part
    summary    requests for everything that the passages say about a subject
    reasoning  word problems of three to five steps
    plain      questions of all these kinds, to be asked without a chat template
"""

HELDOUT_KINDS: Final[tuple[HeldoutKind, ...]] = get_args(HeldoutKind)


@dataclass(frozen=True)
class HandbookQuestion:
    """A question about the handbook.

    ``source`` is the document with the answer, or None if no document has it.
    """

    question: str
    answer: str
    source: str | None
    skill: str


@dataclass(frozen=True)
class HeldoutQuestion:
    """A question that is not in the members' training data.

    ``skill`` is the skill that the question needs, or the kind of a question with a long answer.
    ``passages`` hold the answer. Questions that need no passages, such as those in arithmetic, have
    none.
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


def heldout_questions(
    limit: int | None = None, kind: HeldoutKind = "facts"
) -> tuple[HeldoutQuestion, ...]:
    """Return the held-out questions of a kind. In ``facts`` and ``plain``, the skills take turns.

    The names, values and problems in them do not occur in the members' training data.

    Args:
        limit: number of questions to return, starting with the first. None for all.
        kind: the kind of the questions.

    Raises:
        InvalidInputError: `limit` is not positive, or higher than the number of questions; or there
            is no such kind.
    """
    if kind not in HELDOUT_KINDS:
        raise InvalidInputError(
            f"there are no held-out questions of the kind {kind!r}.{nearest(kind, HELDOUT_KINDS)} "
            f"Kinds: {', '.join(HELDOUT_KINDS)}."
        )
    file = HELDOUT if kind == "facts" else HELDOUT_LONG
    found = map(json.loads, gzip.decompress(file.read_bytes()).decode("utf-8").splitlines())
    lines = [line for line in found if line.pop("kind", "facts") == kind]
    if limit is not None and not 1 <= limit <= len(lines):
        raise InvalidInputError(
            f"the package has {len(lines)} held-out questions of the kind {kind!r}; got a limit of "
            f"{limit}. Use a limit from 1 to {len(lines)}."
        )
    for line in lines[:limit]:
        line["passages"] = tuple(Passage(**passage) for passage in line["passages"])
    return tuple(HeldoutQuestion(**line) for line in lines[:limit])


def final_answer(text: str) -> str:
    """Return the answer in a reply, without surrounding whitespace and one final period.

    The answer is the text after the last ``The answer is``. A reply without these words is the
    answer as a whole.
    """
    return text.rsplit("The answer is", 1)[-1].strip().removesuffix(".").strip()
