"""Documents for question answering: read files, split them into passages, search the passages.

passages = read_documents([Path("handbook")])
best = Retriever(passages).search("Who founded the mill?", k=3)
messages = question_messages("Who founded the mill?", best)
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from adafuse_llm.errors import (
    InvalidInputError,
    MissingDependencyError,
    install_command,
    short_list,
)
from adafuse_llm.text.words import UNSPACED

__all__ = ["INSTRUCTION", "Passage", "Retriever", "question_messages", "read_documents"]

MARKDOWN: Final = (".md", ".markdown")
SUFFIXES: Final = (*MARKDOWN, ".txt", ".pdf")
INSTRUCTION: Final = "Answer from the passages. If they do not say, answer: not stated."
"""The instruction that `question_messages` puts above the passages."""

HEADING: Final = re.compile(r"#{1,6}[ \t]+\S")
FENCE: Final = re.compile(r"\s*(`{3,}(?!.*`)|~{3,})")
"""The beginning of a block of code. The same characters, or more of them, end it."""
BLANK: Final = re.compile(r"[^\S\n]*\n\s*\n")
BREAKS: Final = ((r"\n\n", "\n\n"), (r"\n", "\n"), (r"(?<=[.!?])\s+", " "), (r"\s+", " "))
"""Where a long text is split: between paragraphs, lines, sentences and words. Each pattern has the
text that joins short pieces again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Passage:
    """A piece of a document, with the name of its source.

    Attributes:
        score: how well the passage fits the query that found it (BM25); 0 if it shares no word.
    """

    source: str
    text: str
    score: float = field(default=0.0, compare=False)


def read_documents(
    paths: Iterable[str | os.PathLike[str]],
    *,
    max_chars: int = 900,
    on_skip: Callable[[str], object] = logger.warning,
) -> list[Passage]:
    """Read text, Markdown and PDF files, and folders of such files, as passages.

    A section of a Markdown file, from its heading to the next heading, becomes one passage if it
    has at most ``max_chars`` characters. A longer section or another file is split between
    paragraphs, lines, sentences or words. Passages follow the order of the paths, and files in a
    folder are sorted by name. Hidden files and files with other suffixes are skipped. A PDF file
    needs the package pypdf, and must contain text, not only images.

    Args:
        paths: the files and folders.
        max_chars: maximum number of characters of a passage.
        on_skip: function to call with a message about everything else that cannot be read.

    Raises:
        InvalidInputError: there is no path, a path does not exist, a file has another suffix or is
            not UTF-8, a folder has no documents, or the documents have no text.
    """
    roots = [Path(path) for path in paths]
    passages: list[Passage] = []
    for root in roots:
        for file, source in _files(root):
            try:
                text = BLANK.sub("\n\n", _read(file, on_skip).replace("\r\n", "\n"))
            except (InvalidInputError, MissingDependencyError) as error:
                if file == root:
                    raise
                on_skip(f"skipped: {error}")
                continue
            sections = _sections(text) if file.suffix.lower() in MARKDOWN else [text]
            for section in sections:
                pieces = _pieces(section.strip("\n").rstrip(), max_chars, BREAKS)
                passages += [Passage(source, piece) for piece in pieces if piece]
    if not passages:
        raise InvalidInputError(
            f"no text in {short_list(map(str, roots))}: the documents are empty or cannot be read"
        )
    return passages


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file under ``root`` with the name of its source, its path below ``root``."""
    if root.is_file():
        if root.suffix.lower() not in SUFFIXES:
            raise InvalidInputError(
                f"cannot read {root}: its suffix must be one of {', '.join(SUFFIXES)}; got "
                f"{root.suffix or 'no suffix'!r}"
            )
        yield root, root.name
        return
    if not root.is_dir():
        raise InvalidInputError(f"no such file or folder: {root}")
    files = [
        path
        for path in sorted(root.rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file()
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not files:
        raise InvalidInputError(
            f"no documents in {root}: no file name ends in {', '.join(SUFFIXES)}"
        )
    for path in files:
        yield path, path.relative_to(root).as_posix()


def _read(path: Path, on_skip: Callable[[str], object]) -> str:
    try:
        if path.suffix.lower() == ".pdf":
            return _read_pdf(path, on_skip)
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"cannot read {path}: it is not UTF-8 text ({error})") from error
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from error


def _read_pdf(path: Path, on_skip: Callable[[str], object]) -> str:
    try:
        import pypdf
    except ImportError as error:
        raise MissingDependencyError(
            f"cannot read {path}: PDF files need pypdf: pip install pypdf"
        ) from error
    log = logging.getLogger("pypdf")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it warns of each oddity in a file
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(path).pages]
    except Exception as error:  # also of packages that pypdf lacks, for some encrypted files
        reason = f"it is not a readable PDF, or it needs a password ({error})"
        raise InvalidInputError(f"cannot read {path}: {reason}") from error
    finally:
        log.setLevel(level)
    empty = [str(number) for number, page in enumerate(pages, start=1) if not page.strip()]
    if len(empty) == len(pages):
        raise InvalidInputError(
            f"cannot read {path}: it has no text, perhaps because its pages are images"
        )
    if empty:
        on_skip(
            f"skipped {len(empty)} of {len(pages)} pages of {path} that have no text, perhaps "
            f"because they are images: {short_list(empty)}"
        )
    return "\n\n".join(pages)


def _sections(text: str) -> list[str]:
    """Split Markdown at its headings, which are not in code. Headings stay with the text below."""
    sections, has_text, fence = [""], False, ""
    for line in text.split("\n"):
        if fence and re.fullmatch(rf"\s*{fence}{fence[0]}*\s*", line):
            fence = ""
        elif not fence and (opens := FENCE.match(line)):
            fence = opens[1]
        is_heading = not fence and HEADING.match(line) is not None
        if is_heading and has_text:
            sections.append("")
            has_text = False
        has_text = has_text or (bool(line.strip()) and not is_heading)
        sections[-1] += f"{line}\n"
    return sections


def _pieces(text: str, max_chars: int, breaks: Sequence[tuple[str, str]]) -> list[str]:
    if len(text) <= max_chars:
        return [text]
    if not breaks:
        return [text[start : start + max_chars] for start in range(0, len(text), max_chars)]
    (pattern, joiner), *finer = breaks
    pieces: list[str] = []
    for part in filter(None, re.split(pattern, text)):
        for piece in _pieces(part.rstrip(), max_chars, finer):
            if pieces and len(joined := f"{pieces[-1]}{joiner}{piece}") <= max_chars:
                pieces[-1] = joined
            else:
                pieces.append(piece)
    return pieces


class Retriever:
    """A BM25 search over passages (the ``bm25s`` package). The constructor indexes all passages.

    Raises:
        InvalidInputError: no passages are given.
        MissingDependencyError: ``bm25s`` is not installed.
    """

    def __init__(self, passages: Iterable[Passage]) -> None:
        self.passages: tuple[Passage, ...] = tuple(passages)
        if not self.passages:
            raise InvalidInputError("no passages to search: read at least one document first")
        try:
            import bm25s
        except ImportError as error:
            raise MissingDependencyError(
                f"document search needs the package bm25s: {install_command('cli')}"
            ) from error
        letter = UNSPACED.pattern  # counts as a word
        words: Any = {"token_pattern": rf"{letter}|(?:(?!{letter})\w){{2,}}", "stopwords": "en"}
        self._words = partial(bm25s.tokenize, **words, return_ids=False, show_progress=False)
        self._index = bm25s.BM25()
        texts = [f"{passage.source} {passage.text}" for passage in self.passages]
        self._index.index(self._words(texts), show_progress=False)

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """Return at most ``k`` passages that share a word with ``query``, best first.

        If no passage shares a word, return the first ``k``, so that there is always something to
        answer from.
        """
        if k < 1:
            raise InvalidInputError(f"k must be at least 1, got {k}")
        words = self._words(query)
        k = min(k, len(self.passages))
        if not words[0]:
            return list(self.passages[:k])
        indices, scores = self._index.retrieve(words, k=k, show_progress=False)
        passages = [
            replace(self.passages[int(index)], score=float(score))
            for index, score in zip(indices[0], scores[0], strict=True)
            if score > 0
        ]
        return passages or list(self.passages[:k])


def question_messages(question: str, passages: Sequence[Passage]) -> list[dict[str, str]]:
    """Return one user message that contains the passages and then the question.

    Without passages, the message is only the question.
    """
    if not question.strip():
        raise InvalidInputError("the question is empty")
    content = f"Question: {question.strip()}"
    if passages:
        numbered = [f"[{n}] {passage.text}" for n, passage in enumerate(passages, start=1)]
        content = "\n\n".join([INSTRUCTION, *numbered, content])
    return [{"role": "user", "content": content}]
