"""Answer questions from documents: read files, split them into passages, search the passages.

passages = read_documents([Path("handbook")])
best = Retriever(passages).search("Who founded the mill?", k=3)
messages = question_messages("Who founded the mill?", best)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
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

SUFFIXES: Final = (".md", ".markdown", ".txt")
INSTRUCTION: Final = "Answer from the passages. If they do not say, answer: not stated."
"""The instruction that `question_messages` puts above the passages."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Passage:
    """A piece of a document, with the name of its source.

    Attributes:
        score: how well the passage fits a search (BM25). 0 if the passage has no word of the query.
    """

    source: str
    text: str
    score: float = field(default=0.0, compare=False)


def read_documents(
    paths: Iterable[str | os.PathLike[str]], *, max_chars: int = 900
) -> list[Passage]:
    """Read text and Markdown files (.txt, .md, .markdown), and folders of them, as passages.

    A file with at most ``max_chars`` characters becomes one passage. LangChain's
    ``RecursiveCharacterTextSplitter`` splits a longer file before headings, or else between
    paragraphs, lines or words. Passages have the order of the paths, and files in a folder are
    sorted by name. In a folder, hidden files and files with other suffixes are skipped; so are PDF
    and unreadable files, with a warning.

    Args:
        paths: the files and folders.
        max_chars: maximum number of characters of a passage.

    Raises:
        InvalidInputError: there is no path, a path does not exist or is a file that is not UTF-8
            or has another suffix, a folder has no documents, or the documents have no text.
        MissingDependencyError: ``langchain-text-splitters``, which longer files need, is missing.
    """
    roots = [Path(path) for path in paths]
    passages: list[Passage] = []
    for root in roots:
        for file in _files(root):
            try:
                text = _read(file)
            except InvalidInputError as error:
                if file == root:
                    raise
                logger.warning("skipped: %s", error)
                continue
            source = file.name if file == root else file.relative_to(root).as_posix()
            passages += [Passage(source, piece) for piece in _pieces(text.strip(), max_chars)]
    if not passages:
        raise InvalidInputError(
            f"no text in {short_list(map(str, roots))}: the documents are empty or cannot be read"
        )
    return passages


def _files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise InvalidInputError(f"no such file or folder: {root}")
    files = [
        path
        for path in sorted(root.rglob("*"))
        if path.suffix.lower() in (*SUFFIXES, ".pdf") and path.is_file()
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not files:
        raise InvalidInputError(
            f"no documents in {root}: no file name ends in {', '.join(SUFFIXES)}"
        )
    return files


def _read(path: Path) -> str:
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInputError(
            f"cannot read {path}: its suffix must be one of {', '.join(SUFFIXES)}; got "
            f"{path.suffix or 'no suffix'!r}. Load PDF and other files with LangChain or "
            "LlamaIndex, as in docs/guides/your-documents.md."
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"cannot read {path}: it is not UTF-8 text ({error})") from error
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from error


def _pieces(text: str, max_chars: int) -> list[str]:
    if len(text) <= max_chars:  # the import below takes more than a second
        return [text] if text else []
    try:
        from langchain_text_splitters import Language, RecursiveCharacterTextSplitter
    except ImportError as error:
        raise MissingDependencyError(
            f"long documents need langchain-text-splitters: {install_command('cli')}"
        ) from error
    splitter = RecursiveCharacterTextSplitter.from_language(
        Language.MARKDOWN, chunk_size=max_chars, chunk_overlap=0
    )
    return splitter.split_text(text)


class Retriever:
    """A BM25 search over passages (the ``bm25s`` package). The constructor indexes all passages.

    Raises:
        InvalidInputError: there are no passages.
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
        letter = UNSPACED.pattern  # one such letter counts as a word
        words: Any = {"token_pattern": rf"{letter}|(?:(?!{letter})\w){{2,}}", "stopwords": "en"}
        self._words = partial(bm25s.tokenize, **words, return_ids=False, show_progress=False)
        self._index = bm25s.BM25()
        texts = [f"{passage.source} {passage.text}" for passage in self.passages]
        self._index.index(self._words(texts), show_progress=False)

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """Return at most ``k`` passages that share a word with ``query``, the best first.

        Stop words, such as "the", do not count. If no passage fits, return the first ``k``,
        so that the members always have text to answer from.
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
