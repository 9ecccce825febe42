"""The members and chats of the suites: the embedded members, and real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from adafuse_llm import AdaFuseEngine
from adafuse_llm.documents import question_messages
from adafuse_llm.embedded import member_paths
from benchmarks.heldout import long_questions
from benchmarks.real.members import ALL, real_files, real_folders

Chat = Sequence[Any]
"""The messages of a request."""

PASSAGE: Final = (
    "The Eiffel Tower is a wrought-iron lattice tower in Paris. It is named after the engineer "
    "Gustave Eiffel, whose company designed and built the tower from 1887 to 1889 as the "
    "centerpiece of the 1889 World's Fair."
)
"""A text of 59 tokens of the real members."""

QUESTIONS: Final = (
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a Python function that reverses a string.",
    f"{PASSAGE}\n\nWho built the tower, and when? Quote the text.",
)


CHATS: Final = (
    "What is a hash table? Answer in two sentences.",
    "Write an SQL query that lists the ten customers with the most orders.",
    "Give three tips for learning to play the piano.",
    "Write a Python function that counts the vowels of a text.",
    "Why do leaves change their color in autumn?",
)
"""Other chats, on which no decision of this project was based."""


@dataclass(frozen=True)
class Suite:
    """Members, chats and sizes.

    Attributes:
        groups: names of the members of each ensemble. The last member of an ensemble is the
            largest. Comparisons with only one ensemble use the first.
        chats: the chats.
        folder: returns a member's checkpoint for transformers.
        response: highest number of tokens of a response.
        more, counted: further chats for the comparison `drafts`, and its highest number of tokens
            of a response.
        requests: number of requests at once.
        prompts: repetitions of `PASSAGE` in long prompts.
    """

    groups: tuple[tuple[str, ...], ...]
    chats: tuple[Chat, ...]
    folder: Callable[[str], Path]
    response: int
    more: tuple[Chat, ...] = ()
    counted: int = 40
    requests: int = 16
    prompts: tuple[int, ...] = (33, 133)

    def quick(self) -> Suite:
        """Return the suite at toy sizes."""
        return replace(
            self,
            groups=self.groups[:1],
            chats=self.chats[:2],
            more=(),
            counted=8,
            response=8,
            requests=4,
            prompts=(2,),
        )

    @contextmanager
    def ensemble(self, names: Sequence[str], kind: str = "") -> Iterator[AdaFuseEngine]:
        """Load an ensemble that keeps nothing between requests.

        Args:
            names: the members.
            kind: the type of the weights of GGUF members; empty for transformers members.
        """
        options: dict[str, Any] = {"prefix_cache_bytes": 0}
        if kind:
            options |= {"threads": 1, "context": 4096}
            paths = [gguf_file(name, kind) for name in names]
        else:
            paths = [self.folder(name) for name in names]
        specs = [{"path": path, **options} for path in paths]
        with AdaFuseEngine.from_pretrained(specs, dtype="float32") as engine:
            yield engine


def embedded() -> Suite:
    """Return the embedded members with held-out questions that have long answers."""
    folders = {path.name: path for path in member_paths()}
    cases = long_questions("summary")[:4]
    return Suite(
        (tuple(folders),),
        tuple(question_messages(case.question, case.passages) for case in cases),
        folders.__getitem__,
        response=96,
        prompts=(13,),
    )


def real() -> Suite:
    """Return the members that ``make real`` fetches, with questions for assistants."""
    return Suite(
        (("smollm", "qwen"), ("smollm", "gemma", "qwen")),
        _chats(QUESTIONS),
        lambda name: real_folders(ALL)[name],
        response=24,
        more=_chats(CHATS),
    )


def large() -> Suite:
    """Return ensembles with a larger member, which `benchmarks.real.members` fetches on request."""
    return replace(
        real(),
        groups=(
            ("qwen", "qwen-1.5b"),
            ("smollm", "qwen-1.5b"),
            ("smollm", "qwen", "qwen-1.5b"),
        ),
        chats=_chats(CHATS),
        response=64,
        more=_chats(QUESTIONS),
    )


def _chats(questions: Sequence[str]) -> tuple[Chat, ...]:
    return tuple([{"role": "user", "content": text}] for text in questions)


def gguf_file(name: str, kind: str) -> Path:
    """Return the downloaded file (4 bits per weight), or one of another type, written from it."""
    from tests.support.gguf_files import rewrite_gguf

    file = real_files(ALL)[name]
    out = file if kind == "q4" else file.with_name(f"{file.stem}-{kind}.gguf")
    if not out.is_file():
        print(f"writing {out.name}", file=sys.stderr, flush=True)
        rewrite_gguf(file, out.with_suffix(".new"), kind).replace(out)
    return out


SUITES: Final = {"embedded": embedded, "real": real, "large": large}
