"""Layouts: where the passages and the question stand in a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from adafuse_llm.documents import Passage, question_messages


@dataclass(frozen=True)
class Layout:
    """A prompt for many questions about the same passages.

    Attributes:
        before: the part that all questions share.
        pattern: the rest of the prompt, with ``{q}`` in place of the question.
        system: a system message.
        plain: whether the prompt is plain text, without a chat template.
        history: patterns of an earlier question and its answer.
    """

    before: str
    pattern: str
    system: str = ""
    plain: bool = False
    history: tuple[str, str] | None = None

    def ask(self, question: str) -> str:
        """Return the part after ``before`` with the question in its place."""
        return self.pattern.replace("{q}", question)


_HEADS: Final = (
    "",
    "Context:\n",
    "Context information:\n",
    "Notes:\n\n",
    "Read these notes first.\n\n",
    "Some text to read:\n----------\n",
    "Reply to the question from the context only.\n\nContext:\n",
    "Keep to what the documents say.\n\nDocuments:\n",
    "You help people to find facts in documents.\n\n",
)
_TAILS: Final = (
    "\n\nQuestion: {q}",
    "\n\nQuestion: {q}\nAnswer:",
    "\n\n{q}",
    "\n----------\nFrom this text alone, answer: {q}",
    "\n\nQuery: {q}\nAnswer:",
    "\n\nNow the question: {q}",
    "\n\nQuestion: {q}\nReply with the answer only.",
    "\n\nBased on the above, {q}\n",
)
_QUESTION_FIRST: Final = (
    ("Question: {q}\n\nContext:\n", ""),
    ("{q}\n\n", ""),
    ("Question: {q}\n\nPassages:\n\n", "\n\nAnswer:"),
    ("Find the answer to this question in the text: {q}\n\nText:\n", ""),
)
SYSTEMS: Final = (
    "Answer from the passages. If they do not say, answer: not stated.",
    "You answer questions about documents.",
    "You are a helpful assistant. Answer in a few words.",
    "Give short answers. Say not stated when the text does not say.",
)


def _join(rng: random.Random, passages: Sequence[Passage]) -> str:
    style = rng.randrange(6)
    if style == 0:
        return "\n\n".join(f"[{n}] {p.text}" for n, p in enumerate(passages, start=1))
    if style == 1:
        return "\n\n".join(f"Passage {n}:\n{p.text}" for n, p in enumerate(passages, start=1))
    if style == 2:
        return "\n---\n".join(p.text for p in passages)
    if style == 3:
        return "\n\n".join(f"Source: {p.source}\n{p.text}" for p in passages)
    if style == 4:
        return "\n".join(p.text for p in passages)
    return "\n\n".join(p.text for p in passages)


def plain_layout(passages: Sequence[Passage]) -> Layout:
    """Return the standard form of `question_messages`, without a chat template."""
    content = question_messages("{q}", passages)[0]["content"]
    before = content[: -len("Question: {q}")]
    return Layout(before, "Question: {q}\nAnswer:", plain=True)


def draw_layout(rng: random.Random, passages: Sequence[Passage]) -> Layout:
    """Draw a layout. Three in five layouts have the standard form of ``question_messages``."""
    chance = rng.random()
    if chance < 0.6:
        content = question_messages("{q}", passages)[0]["content"]
        before, after = content[: -len("Question: {q}")], "Question: {q}"
        system = rng.choice(SYSTEMS) if rng.random() < 0.1 else ""
        return Layout(before, after, system)
    text = _join(rng, passages)
    if chance < 0.67:
        first, last = rng.choice(_QUESTION_FIRST)
        system = rng.choice(SYSTEMS) if rng.random() < 0.3 else ""
        return Layout("", first + text + last, system)
    before, after = rng.choice(_HEADS) + text, rng.choice(_TAILS)
    if chance < 0.75:
        if not after.endswith("Answer:"):
            after += "\nAnswer:"
        return Layout(before, after, plain=True)
    if chance < 0.83:
        return Layout("", "{q}", system=rng.choice((*SYSTEMS, "Use this context.")) + "\n\n" + text)
    system = rng.choice(SYSTEMS) if rng.random() < 0.4 else ""
    if chance < 0.87:
        return Layout(before, after, system, history=("Question: {q}", "{a}"))
    return Layout(before, after, system)
