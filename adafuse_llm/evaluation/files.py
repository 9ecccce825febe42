"""Read texts and test sets, write results, and resume interrupted runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from adafuse_llm.errors import InvalidInputError, short_repr


class Line(NamedTuple):
    """A line of a test set: its number from 1, "question", "answer" (`label`) and whole object."""

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
        InvalidInputError: a line cannot be used, all lines are blank, or the text is not UTF-8.
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
        # refuse half a surrogate pair, NaN and infinity, because results cannot contain them
        json.dumps(item, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: not JSON: {error}") from error
    question = item.get("question") if isinstance(item, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise InvalidInputError(f'{where}: not an object with a text "question" that is not empty')
    if "answer" not in item:
        raise InvalidInputError(f'{where}: it has no "answer"')
    return Line(number, question, item["answer"], item)


REMEDY = "Delete it to start again, or choose another output."


class Results:
    """A JSON Lines file with the settings of a run and then its results. A lock file guards it.

    Only complete lines count, so text after the last newline is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._first: dict[str, Any] | None = None  # the settings, until there is a result

    @contextmanager
    def resumed(
        self, settings: dict[str, Any], *, afresh: bool = False
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the results so far. No other process can use the file during the ``with`` block.

        Args:
            settings: the settings on which the results depend, as JSON data.
            afresh: whether to drop the results so far.

        Raises:
            InvalidInputError: another process uses the file, or it has something else than results
                with these settings.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.with_name(f"{self.path.name}.lock"), blocking=False)
        try:
            held = lock.acquire()
        except Timeout:
            raise InvalidInputError(
                f"{self.path} is in use: another process is writing to it. Wait until it ends, or "
                "choose another output."
            ) from None
        with held:
            content = self.path.read_bytes() if self.path.exists() and not afresh else b""
            lines = [line + b"\n" for line in content.split(b"\n")[:-1]]
            known = self._read(lines, settings) if content else []
            if known:
                with self.path.open("ab") as file:
                    file.truncate(sum(map(len, lines)))
            self._first = None if known else settings
            yield known

    def _read(self, lines: list[bytes], settings: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the results in the lines of a file. Raise an error if it has other settings."""
        try:
            theirs, *results = map(json.loads, lines)
            names = {**settings, **theirs}
        except (ValueError, TypeError) as error:
            raise InvalidInputError(
                f"{self.path} was not written by this command ({error}). {REMEDY}"
            ) from error
        for name in names:
            left, right = theirs.get(name), settings.get(name)
            if json.dumps(left) != json.dumps(right):
                raise InvalidInputError(
                    f"{self.path} belongs to another run: {name} {short_repr(left)}, not "
                    f"{short_repr(right)}. {REMEDY}"
                )
        return results

    def append(self, record: dict[str, Any]) -> None:
        """Append a result. If `resumed` yielded none, the first result replaces the file."""
        is_first, records = self._first is not None, [*filter(None, [self._first]), record]
        with self.path.open("wb" if is_first else "ab") as file:
            for each in records:
                file.write(json.dumps(each, ensure_ascii=False).encode() + b"\n")
        self._first = None
