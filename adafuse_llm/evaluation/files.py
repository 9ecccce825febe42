"""Read test sets and write results as JSON Lines, and resume interrupted runs."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from adafuse_llm.errors import InvalidInputError, short_repr


@dataclass(frozen=True)
class Line:
    """A line of a test set.

    Attributes:
        number: the line's number, from 1.
        question: the question.
        label: the accepted answer or answers, as in the file.
        item: all that the line has, by name.
    """

    number: int
    question: str
    label: Any
    item: dict[str, Any]


def read_text(path: Path) -> str:
    """Return the text of a file, or raise `InvalidInputError` if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from error


def read_lines(content: bytes) -> list[Line]:
    """Return the lines of a test set that are not blank.

    Raises:
        InvalidInputError: a line cannot be used, all are blank, or the text is UTF-16.
    """
    if b"\0" in content:
        raise InvalidInputError("the test set is not UTF-8 text. Save it as UTF-8.")
    raw = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
    lines = [_read_line(number, line) for number, line in raw if line.strip()]
    if not lines:
        raise InvalidInputError(
            'the test set is empty; every line needs a "question" and an "answer"'
        )
    return lines


def _read_line(number: int, raw: bytes) -> Line:
    where = f"line {number} of the test set"
    try:
        item = json.loads(raw)
        # refuse half a surrogate pair, NaN and infinity, which results cannot contain
        json.dumps(item, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: not JSON: {error}") from error
    question = item.get("question") if isinstance(item, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise InvalidInputError(f'{where}: not an object with a text "question" that is not empty')
    if "answer" not in item:
        raise InvalidInputError(f'{where}: it has no "answer"')
    return Line(number, question, item["answer"], item)


class Results:
    """An output file, with a second file that describes its run, and a third one to lock it.

    Only complete lines count, so text after the last newline is dropped. If a failed question is
    answered again, its later result replaces the earlier one. If the file belongs to another run,
    the error ends with `remedy`.
    """

    def __init__(
        self, path: Path, remedy: str = "Pass --overwrite to start again, or another --output."
    ) -> None:
        if path.exists() and not path.is_file():  # reading from a pipe would block
            raise InvalidInputError(f"{path} is not a regular file. Choose another output.")
        self.path = path
        self._remedy = remedy
        self._identity = self._beside("run.json")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing to this file during the ``with`` block.

        Raises:
            InvalidInputError: another process holds the lock.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self._beside("lock"), blocking=False):
                yield
        except Timeout:
            raise InvalidInputError(
                f"{self.path} is in use: another process is writing to it. Wait until it ends, or "
                "choose another output."
            ) from None

    def done(self, identity: dict[str, Any], numbers: Container[int]) -> list[dict[str, Any]]:
        """Return the results that the file already has, in the order of their lines.

        Raises:
            InvalidInputError: the results belong to another run, with another identity or other
                line numbers.
        """
        if not self.path.exists() or not self.path.stat().st_size:
            return []
        lines = self._lines()
        try:
            theirs = json.loads(self._identity.read_text(encoding="utf-8"))
            last = {record["line"]: record for record in map(json.loads, lines)}
            if not all(number in numbers for number in last):
                raise ValueError("it has other lines")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidInputError(
                f"{self.path} was not written by this command ({error}). {self._remedy}"
            ) from error
        for key in {**identity, **theirs}:
            left, right = theirs.get(key), identity.get(key)
            if json.dumps(left) != json.dumps(right):
                raise InvalidInputError(
                    f"{self.path} belongs to another run: {key} {short_repr(left)}, not "
                    f"{short_repr(right)}. {self._remedy}"
                )
        return [last[number] for number in sorted(last)]

    def begin(self, identity: dict[str, Any], *, afresh: bool) -> None:
        """Drop an incomplete last line or, if `afresh`, all lines, so that `append` can go on."""
        with self.path.open("ab") as file:
            file.truncate(0 if afresh else sum(map(len, self._lines())))
        if afresh:
            self._identity.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        """Append a result to the file."""
        with self.path.open("ab") as file:
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{ending}")

    def _lines(self) -> list[bytes]:
        content = self.path.read_bytes() if self.path.exists() else b""
        return [line + b"\n" for line in content.split(b"\n")[:-1]]
