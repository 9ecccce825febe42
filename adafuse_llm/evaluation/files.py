"""Test sets in, results out: JSON Lines, resumable after an interruption."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adafuse_llm.errors import CacheMemoryError, ContextWindowError, InvalidInputError

LASTING = (ContextWindowError.__name__, CacheMemoryError.__name__)
"""Errors that a question meets whenever it is asked of these members."""

QUESTION_FORM = "Question: {question}\nAnswer:"
"""How a question is put where nothing says otherwise."""


@dataclass(frozen=True)
class Line:
    """A line of the test set: its number from 1, and what it says or why that is unusable."""

    number: int
    question: str | None = None
    label: Any = None
    problem: str | None = None


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        InvalidInputError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8 text: {error}") from error


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


def put(prompt: str, *, chat: bool) -> dict[str, Any]:
    """What an engine is asked: the prompt itself, or the prompt as a user's message."""
    return {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}


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


def is_lost(error: str | None) -> bool:
    """Whether what is noted as an error came of the run and not of the question: out of memory, a
    closed engine, a fault. The question may be answered another time.

    Args:
        error: the error's type, a colon, and what it says; None for none.
    """
    return error is not None and error.partition(":")[0] not in LASTING


class Results:
    """The output file and, beside it, a description of the run it belongs to.

    Only whole lines count: what follows the last newline was cut off, and is dropped. A result that
    is written again, as its question had failed, takes the place of the earlier one.

    Args:
        path: of the output file.
        remedy: what to do where it belongs to another run.
    """

    def __init__(
        self, path: Path, remedy: str = "Pass --overwrite to start again, or another --output."
    ) -> None:
        self.path = path
        self._remedy = remedy
        self._identity = path.with_name(f"{path.name}.run.json")

    def is_at(self, path: Path) -> bool:
        """Whether the output would overwrite `path`."""
        return self.path.exists() and self.path.samefile(path)

    def done(self, identity: dict[str, Any], numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The results that are there already, in order; changes nothing.

        Args:
            identity: what must be the same for a run to be resumed.
            numbers: the line numbers that the run will write, ascending.

        Raises:
            InvalidInputError: they are not those of this run.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content:
            return []
        self._check(identity)
        try:
            records = [json.loads(line) for line in content.split(b"\n")[:-1]]
            last = {record["line"]: record for record in records}
            found = sorted(last)
        except (ValueError, TypeError, KeyError) as error:
            raise self._refusal("holds lines that are no results") from error
        if found != list(numbers[: len(found)]):
            raise self._refusal("holds other lines than this run would have written")
        return [last[number] for number in found]

    def begin(self, identity: dict[str, Any], *, afresh: bool) -> None:
        """Get ready to append: to nothing, or to the whole lines that are there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = b"" if afresh or not self.path.exists() else self.path.read_bytes()
        with self.path.open("ab") as file:
            file.truncate(content.rfind(b"\n") + 1)
        if afresh:
            self._identity.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")

    def tidy(self) -> None:
        """Put the lines in order, each once: the later one where a result was written again."""
        lines = [line + b"\n" for line in self.path.read_bytes().split(b"\n")[:-1]]
        last = {json.loads(line)["line"]: line for line in lines}
        ordered = [last[number] for number in sorted(last)]
        if ordered != lines:
            other = self.path.with_name(f"{self.path.name}.new")
            other.write_bytes(b"".join(ordered))
            other.replace(self.path)

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
        return InvalidInputError(f"{self.path} {reason}. {self._remedy}")
