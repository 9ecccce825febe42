"""Test sets in, results out: JSON Lines, resumable after an interruption."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adafuse_llm.errors import InvalidInputError

QUESTION_FORM = "Question: {question}\nAnswer:"
"""How a question is put where nothing says otherwise."""


@dataclass(frozen=True)
class Line:
    """A line of the test set: its number from 1, and what it says or why that is unusable."""

    number: int
    question: str | None = None
    label: Any = None
    problem: str | None = None


def question_form(header: str, default: str = QUESTION_FORM) -> str:
    """How the examples of a prompt put a question, read off the last of them; `default` if there
    are none.
    """
    examples = re.findall(r"^Question:.*?(?=^Question:|\Z)", header, re.MULTILINE | re.DOTALL)
    if not examples:
        return default
    example = examples[-1]
    space = "\n" if example.startswith("Question:\n") else " "
    cue = re.search(r"^(?:Answer:|Let's think step by step\.?)\n?", example, re.MULTILINE)
    return f"Question:{space}{{question}}\n{cue[0] if cue else 'Answer:'}"


def read_lines(content: bytes) -> list[Line]:
    """The lines of a test set, less blank ones.

    Raises:
        InvalidInputError: there is none.
    """
    raw = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
    lines = [_read_line(number, line) for number, line in raw if line.strip()]
    if not lines:
        raise InvalidInputError("the test set is empty: it needs lines with question and answer")
    return lines


def _read_line(number: int, raw: bytes) -> Line:
    try:
        item = json.loads(raw)
        json.dumps(item, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        return Line(number, problem=f"not JSON: {error}")
    if not isinstance(item, dict) or not isinstance(item.get("question"), str):
        return Line(number, problem='not an object with a text "question"')
    if not item["question"].strip():
        return Line(number, problem='its "question" is empty')
    if "answer" not in item:
        return Line(number, item["question"], problem='it has no "answer"')
    return Line(number, item["question"], item["answer"])


class Results:
    """The output file and, beside it, a description of the run it belongs to.

    Only whole lines count: what follows the last newline was cut off, and is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity = path.with_name(f"{path.name}.run.json")

    def is_at(self, path: Path) -> bool:
        """Whether the output would overwrite `path`."""
        return self.path.exists() and self.path.samefile(path)

    def done(self, identity: dict[str, Any], numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The results that are there already; changes nothing.

        Args:
            identity: what must be the same for a run to be resumed.
            numbers: the line numbers that the run will write, in order.

        Raises:
            InvalidInputError: they are not those of this run.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content:
            return []
        self._check(identity)
        try:
            records = [json.loads(line) for line in content.split(b"\n")[:-1]]
            found = [record["line"] for record in records]
        except (ValueError, TypeError, KeyError) as error:
            raise self._refusal("holds lines that are no results") from error
        if found != list(numbers[: len(found)]):
            raise self._refusal("holds other lines than this run would have written")
        return records

    def keep(self, count: int, identity: dict[str, Any]) -> None:
        """Drop what follows the first `count` lines, and get ready to append."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(0)
            size = sum(len(file.readline()) for _ in range(count))
            file.truncate(size)
        if not count:
            self._identity.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        """Write a result; it is in the file when this returns."""
        with self.path.open("ab") as file:
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def _check(self, identity: dict[str, Any]) -> None:
        try:
            theirs = json.loads(self._identity.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._refusal(f"was not written by this command (no {self._identity})") from error
        ours = json.loads(json.dumps(identity))
        for key in {**ours, **theirs}:
            if theirs.get(key) != ours.get(key):
                values = f"{theirs.get(key)!r}, not {ours.get(key)!r}"
                what = f"another {key}" if key in ("test set", "prompts") else f"{key} {values}"
                raise self._refusal(f"belongs to a run with {what}")

    def _refusal(self, reason: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.path} {reason}. Pass --overwrite to start again, or another --output."
        )
